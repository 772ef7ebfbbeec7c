"""What SGLang's native API has beside generation: information, flushes, aborts, the schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import minisgl
from minisgl.errors import EngineDeadError
from tests.unit.fake_async_engine import FakeAsyncEngine
from tests.unit.native_calls import routes
from tests.unit.observed import stats
from tests.unit.routes import error_of


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info_tells_where_the_tokenizer_can_be_had(path: str) -> None:
    assert routes(FakeAsyncEngine(model="org/name")).get(path).json() == {
        "model_path": "org/name",
        "tokenizer_path": "org/name",
        "is_generation": True,
        "max_model_len": 100,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
    assert routes(FakeAsyncEngine(tokenizer=None)).get(path).json()["tokenizer_path"] is None


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
def test_server_info_tells_what_was_resolved_and_the_load(path: str) -> None:
    server = routes()
    info = server.get(path).json()
    expected = {
        "served_model_name": "fake",
        "model_path": "/models/fake",
        "version": minisgl.__version__,
        "dtype": "float32",  # not "auto"
        "max_running_requests": 8,  # not null
        "max_total_num_tokens": 1600,
        "page_size": 16,
        "tp_size": 1,
        "dp_size": 1,
        "schedule_policy": "fcfs",
    }
    assert {name: info[name] for name in expected} == expected
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}
    assert info["internal_states"] == [idle]
    server.engine.stats = stats(1.0, 1, num_running=3, num_waiting=2, num_used_pages=50)
    busy = {"num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.5}
    assert server.get(path).json()["internal_states"] == [busy]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_cache_is_flushed(method: str) -> None:
    server = routes()
    response = asyncio.run(server.call(method, "/flush_cache"))
    assert response.status_code == 200
    assert response.text == "Cache flushed: 3 pages freed.\n"
    assert response.headers["content-type"].startswith("text/plain")
    assert server.engine.num_flushes == 1


def test_a_request_is_aborted_by_its_id_and_its_client_told() -> None:
    async def scenario(body: dict[str, Any]) -> tuple[int, list[str]]:
        server = routes(FakeAsyncEngine(manual=True))
        calls = [
            asyncio.ensure_future(server.call("POST", "/generate", json={"text": "a", "rid": rid}))
            for rid in ("x", "y")
        ]
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        response = await server.call("POST", "/abort_request", json=body)
        assert response.status_code == 200
        while server.engine.num_live:
            server.engine.step()
        answers = [(await call).json() for call in calls]
        reasons = [one["meta_info"]["finish_reason"]["type"] for one in answers]
        return response.json()["aborted"], reasons

    assert asyncio.run(scenario({"rid": "y"})) == (1, ["stop", "abort"])
    assert asyncio.run(scenario({"rid": "", "abort_all": True})) == (2, ["abort", "abort"])
    assert asyncio.run(scenario({"rid": "z", "abort_all": False})) == (0, ["stop", "stop"])


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": "x", "abort_all": True}])
def test_an_abort_must_say_of_what(body: dict[str, Any]) -> None:
    assert "either" in error_of(routes().post("/abort_request", body))["message"]


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("GET", "/get_model_info"),
        ("GET", "/get_server_info"),
        ("POST", "/flush_cache"),
    ],
)
def test_a_server_that_is_not_ready_answers_503(method: str, path: str, state: str) -> None:
    server = routes()
    server.context.state.loading = state == "loading"
    server.context.state.draining = state == "draining"
    server.context.state.error = EngineDeadError("gone") if state == "dead" else None
    options = {"json": {"text": "a"}} if path == "/generate" else {}
    error_of(asyncio.run(server.call(method, path, **options)), 503)


def test_the_schema_names_every_parameter_with_its_range() -> None:
    schemas = routes().app.openapi()["components"]["schemas"]
    sampling = schemas["NativeSampling"]["properties"]
    assert sampling["max_new_tokens"]["default"] == 128
    text = json.dumps(sampling["temperature"])
    assert '"maximum": 2' in text
    assert '"minimum": 0' in text
    assert {"text", "input_ids", "sampling_params", "rid"} <= set(
        schemas["GenerateRequest"]["properties"]
    )
