"""Health, models, version, metrics and tokenization over HTTP, on a fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import minisgl
from minisgl.core import SamplingParams
from minisgl.errors import BusyError, ChatTemplateError, EngineDeadError
from minisgl.server import info, probe
from tests.unit.fake_async_engine import BEGIN, VOCAB_SIZE, FakeAsyncEngine, Step
from tests.unit.routes import Routes, error_of

SERVING = [
    ("GET", "/health", None),
    ("GET", "/health_generate", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/v1/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [65]}),
    ("POST", "/v1/detokenize", {"tokens": [65]}),
]


def routes(engine: FakeAsyncEngine | None = None, **config: Any) -> Routes:
    return Routes(info.router, engine, **config)


def call(server: Routes, method: str, path: str, body: Any) -> Any:
    return asyncio.run(server.call(method, path, json=body) if body else server.call(method, path))


@pytest.mark.parametrize(("method", "path", "body"), SERVING)
def test_a_ready_server_answers(method: str, path: str, body: Any) -> None:
    assert call(routes(), method, path, body).status_code == 200


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
@pytest.mark.parametrize(("method", "path", "body"), SERVING)
def test_a_server_that_is_not_ready_answers_503(
    method: str, path: str, body: Any, state: str
) -> None:
    server = routes()
    server.context.state.loading = state == "loading"
    server.context.state.draining = state == "draining"
    server.context.state.error = EngineDeadError("gone") if state == "dead" else None
    error = error_of(call(server, method, path, body), 503)
    assert error["code"] == ("engine_dead" if state == "dead" else "server_busy")


@pytest.mark.parametrize("path", ["/version", "/metrics"])
def test_version_and_metrics_answer_in_every_state(path: str) -> None:
    server = routes()
    server.context.state.loading = True
    server.context.state.error = EngineDeadError("gone")
    assert server.get(path).status_code == 200


# -- health ----------------------------------------------------------------------------------


def test_health_says_ok() -> None:
    assert routes().get("/health").json() == {"status": "ok"}


def test_health_generate_runs_one_greedy_token_before_others() -> None:
    server = routes()
    assert server.get("/health_generate").json() == {"status": "ok"}
    (generation,) = server.engine.submitted
    assert generation.prompt_token_ids == [BEGIN]
    assert generation.params.max_tokens == 1
    assert generation.params.temperature == 0
    assert generation.finished
    (options,) = server.engine.options
    assert options["priority"] < 0
    assert options["cache_salt"]


def test_health_generate_works_without_a_tokenizer() -> None:
    server = routes(FakeAsyncEngine(tokenizer=None))
    assert server.get("/health_generate").status_code == 200
    assert server.engine.submitted[0].prompt_token_ids == [0]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_health_generate_tells_that_its_token_failed(reason: str) -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: [Step("", (), reason)]))
    assert error_of(server.get("/health_generate"), 503)["code"] == "unhealthy"


def test_health_generate_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.01)
    server = routes(FakeAsyncEngine(manual=True))  # never steps
    error = error_of(server.get("/health_generate"), 503)
    assert "no token within 0.01 s" in error["message"]
    assert server.engine.num_live == 0
    assert len(server.engine.aborted) == 1


async def asking(server: Routes, count: int) -> list[asyncio.Task[Any]]:
    """So many callers of `/health_generate` at once, who all wait by now."""
    tasks = [asyncio.ensure_future(server.call("GET", "/health_generate")) for _ in range(count)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    return tasks


def test_callers_of_health_generate_share_one_sequence_whoever_leaves() -> None:
    async def run() -> None:
        server = routes(FakeAsyncEngine(manual=True))
        first, *others = await asking(server, 20)
        assert server.engine.num_live == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert server.engine.num_live == 1
        server.engine.step()
        assert {(await one).status_code for one in others} == {200}
        assert len(server.engine.submitted) == 1

    asyncio.run(run())


@pytest.mark.parametrize(("fresh_s", "count"), [(1e9, 1), (0, 2)])
def test_a_fresh_success_of_health_generate_is_told_again(
    fresh_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FRESH_S", fresh_s)
    server = routes()
    assert [server.get("/health_generate").status_code for _ in range(2)] == [200, 200]
    assert len(server.engine.submitted) == count


def test_a_failure_of_health_generate_is_tried_again() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: [Step("", (), "error")]))
    assert server.get("/health_generate").status_code == 503
    server.engine.script = lambda _ids, _choice: [Step("a", (97,), "length")]
    assert server.get("/health_generate").status_code == 200


def test_a_full_queue_that_moves_is_healthy() -> None:
    async def run() -> None:
        server = routes(FakeAsyncEngine(manual=True, max_queued=1))
        server.engine.submit([[65]], SamplingParams(), request_id="r")
        (task,) = await asking(server, 1)
        server.engine.step()
        assert (await task).status_code == 200
        assert len(server.engine.submitted) == 1
        assert server.engine.observers == []

    asyncio.run(run())


def test_a_full_queue_that_stands_still_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.01)
    server = routes(FakeAsyncEngine(submit_error=BusyError("full")))
    assert error_of(server.get("/health_generate"), 503)["code"] == "unhealthy"


def test_health_may_be_asked_for_without_its_body() -> None:
    server = routes()
    assert asyncio.run(server.call("HEAD", "/health")).status_code == 200
    server.context.state.loading = True
    assert asyncio.run(server.call("HEAD", "/health")).status_code == 503


# -- models, version, metrics ------------------------------------------------------------------


def test_the_model_is_listed() -> None:
    server = routes(FakeAsyncEngine(model="org/name"))
    card = {
        "id": "fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "minisgl",
        "root": "org/name",
        "max_model_len": 100,
    }
    assert server.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert server.get("/v1/models/fake").json() == card


def test_a_model_name_may_have_slashes() -> None:
    server = routes(model_name="org/name")
    for path in ("org/name", "org%2Fname"):
        assert server.get(f"/v1/models/{path}").json()["id"] == "org/name"


@pytest.mark.parametrize("name", ["other", "fake/more", "FAKE"])
def test_another_model_is_not_found(name: str) -> None:
    error = error_of(routes().get(f"/v1/models/{name}"), 404)
    assert error["code"] == "model_not_found"
    assert name in error["message"]


def test_the_version_is_the_package_s() -> None:
    assert routes().get("/version").json() == {"version": minisgl.__version__}


def test_metrics_are_prometheus_text() -> None:
    server = routes()
    server.context.metrics.on_error(400)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'minisgl:request_errors_total{code="400",model_name="fake"} 1.0' in response.text


# -- tokenization ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_is_tokenized(prefix: str) -> None:
    response = routes().post(f"{prefix}/tokenize", {"model": "fake", "prompt": "a b"})
    tokens = [BEGIN, 97, 32, 98]
    assert response.json() == {
        "count": 4,
        "max_model_len": 100,
        "tokens": tokens,
        "token_strs": None,
    }


def test_special_tokens_are_left_out_and_spellings_shown_on_demand() -> None:
    body = {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}
    answer = routes().post("/tokenize", body).json()
    assert answer["tokens"] == [97, 32, 98]
    assert answer["token_strs"] == ["a", "Ġ", "b"]


def test_a_long_text_is_answered_like_a_short_one() -> None:
    body = {"prompt": "a b" * 2000, "add_special_tokens": False, "return_token_strs": True}
    answer = routes().post("/tokenize", body).json()
    assert answer["count"] == 6000
    assert answer["tokens"] == [97, 32, 98] * 2000
    assert answer["token_strs"] == ["a", "Ġ", "b"] * 2000


def test_an_empty_text_has_no_tokens_of_its_own() -> None:
    body = {"prompt": "", "add_special_tokens": False}
    assert routes().post("/tokenize", body).json()["count"] == 0


def test_a_chat_is_tokenized_by_the_template() -> None:
    server = routes()
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "yes"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "add_special_tokens": False,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = server.post("/tokenize", body).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    (chat,) = server.engine.chats
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert chat["add_generation_prompt"] is False
    assert chat["continue_final_message"] is True
    assert chat["tools"] == tools
    assert chat["template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "either prompt or messages"),
        ({"prompt": None}, None, "either prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, None, "either"),
        ({"prompt": 3}, "prompt", "prompt = 3"),
        ({"prompt": ["a"]}, "prompt", "prompt = ['a']"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs", "'yes'"),
        ({"prompt": "a", "return_token_str": True}, "return_token_str", "return_token_strs"),
        ({"prompt": "a", "tools": []}, "tools", "tools needs messages"),
        ({"messages": []}, "messages", "messages = []"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "'robot'"),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
            "is for a prompt",
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"tokenize": False},
            },
            "chat_template_kwargs",
            "'tokenize'",
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
            "exclude each other",
        ),
    ],
)
def test_a_wrong_tokenize_request_is_told_what_is_wrong(
    body: dict[str, Any], param: str | None, words: str
) -> None:
    error = error_of(routes().post("/tokenize", body))
    assert error["param"] == param
    assert words in error["message"]


def test_what_the_template_refuses_is_a_400() -> None:
    server = routes(FakeAsyncEngine(template_error=ChatTemplateError("no system", "messages")))
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert error_of(server.post("/tokenize", body))["message"] == "no system"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens_are_read_as_text_with_special_ones(prefix: str) -> None:
    response = routes().post(f"{prefix}/detokenize", {"tokens": [BEGIN, 104, 105]})
    assert response.json() == {"prompt": "<|begin|>hi"}


def test_tokens_and_text_go_round() -> None:
    server, text = routes(), "Grüße, 世界 🙂"
    ids = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == text


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**40, True, 1.5, "1"])
def test_what_is_no_token_is_refused(token: Any) -> None:
    error = error_of(routes().post("/detokenize", {"tokens": [65, token]}))
    assert error["param"] == "tokens"
    assert "tokens[1]" in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_s_tokens_are_not_here(path: str) -> None:
    body = (
        {"model": "other", "prompt": "a"} if path == "/tokenize" else {"model": "o", "tokens": []}
    )
    assert error_of(routes().post(path, body), 404)["param"] == "model"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_model_without_tokenizer_says_so(path: str) -> None:
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    server = routes(FakeAsyncEngine(tokenizer=None))
    assert "no tokenizer" in error_of(server.post(path, body))["message"]


@pytest.mark.parametrize("text", ["", "[]", '{"prompt": NaN}', "{", '{"prompt": "\\ud800"}'])
def test_what_is_no_json_object_is_a_400(text: str) -> None:
    headers = {"content-type": "application/json"}
    server = routes()
    error_of(asyncio.run(server.call("POST", "/tokenize", content=text, headers=headers)))
