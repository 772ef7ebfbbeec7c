from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from minisgl.errors import (
    BusyError,
    ChatTemplateError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from minisgl.server.errors import (
    ApiError,
    check_model,
    error_body,
    install_error_handlers,
    shorten,
    to_api_error,
)
from minisgl.server.jsonbody import MAX_DEPTH, StrictRoute, parse_json
from minisgl.server.protocol import ChatCompletionRequest, CompletionRequest

FAILURES: dict[str, Exception] = {
    "invalid": InvalidRequestError("top_p = 5 must be at most 1", "top_p"),
    "template": ChatTemplateError("the template says \ud800 no", "messages"),
    "busy": BusyError("the queue is full"),
    "dead": EngineDeadError("/usr/lib/engine.py died"),
    "failed": RequestFailedError("the engine failed while it computed this request"),
    "api": ApiError(418, "a teapot", code="teapot", headers={"X-Pot": "1"}),
    "bug": ZeroDivisionError("/usr/lib/secret.py divided nan"),
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    routes = APIRouter(route_class=StrictRoute)

    @routes.post("/chat")
    async def chat(body: ChatCompletionRequest) -> dict[str, Any]:
        return {"n": body.to_params().n}

    @routes.post("/complete")
    async def complete(body: CompletionRequest) -> dict[str, Any]:
        return {"prompts": body.prompts()}

    @routes.post("/flush")
    async def flush() -> dict[str, Any]:
        return {}

    @routes.get("/item/{number}")
    async def item(number: int, size: int = 1) -> dict[str, Any]:
        return {"number": number, "size": size}

    @routes.get("/fail/{name}")
    async def fail(name: str) -> None:
        raise FAILURES[name]

    app = FastAPI()
    app.include_router(routes)
    install_error_handlers(app)
    return TestClient(app, raise_server_exceptions=False)


def error_of(response: Any) -> dict[str, Any]:
    body = json.loads(response.content.decode("utf-8"), parse_constant=pytest.fail)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    assert "/usr/lib" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def post(client: TestClient, path: str, body: bytes | str) -> Any:
    return client.post(path, content=body, headers={"content-type": "application/json"})


# -- what each exception becomes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "type_", "param", "code"),
    [
        ("invalid", 400, "invalid_request_error", "top_p", None),
        ("template", 400, "invalid_request_error", "messages", None),
        ("busy", 503, "server_busy", None, "server_busy"),
        ("dead", 503, "server_error", None, "engine_dead"),
        ("failed", 500, "server_error", None, "request_failed"),
        ("api", 418, "invalid_request_error", None, "teapot"),
        ("bug", 500, "server_error", None, "internal"),
    ],
)
def test_every_failure_is_an_error_body(
    client: TestClient, name: str, status: int, type_: str, param: str | None, code: str | None
) -> None:
    response = client.get(f"/fail/{name}")
    error = error_of(response)
    assert response.status_code == status
    assert (error["type"], error["param"], error["code"]) == (type_, param, code)


def test_busy_says_when_to_try_again_and_headers_are_kept(client: TestClient) -> None:
    assert int(client.get("/fail/busy").headers["retry-after"]) >= 1
    assert client.get("/fail/api").headers["x-pot"] == "1"


def test_the_unexpected_is_logged_with_its_trace_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        error = to_api_error(FAILURES["bug"])
    assert "divided" not in error.message
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[1] is FAILURES["bug"]


def test_unknown_routes_and_methods_are_error_bodies(client: TestClient) -> None:
    response = client.get("/nowhere")
    assert response.status_code == 404
    assert "GET /nowhere" in error_of(response)["message"]
    response = client.get("/chat")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "POST" in error_of(response)["message"]
    assert client.get("/%ff%00/" + "x" * 5000).status_code == 404
    assert len(client.get("/" + "x" * 5000).content) < 500


def test_a_long_message_is_cut() -> None:
    assert len(error_body(ApiError(400, "x" * 100_000))["error"]["message"]) < 3000


def test_another_model_than_the_served_one_is_not_found() -> None:
    check_model(None, "m")
    check_model("m", "m")
    for name in ("", "other", "M"):
        with pytest.raises(ApiError, match="only 'm'") as caught:
            check_model(name, "m")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert caught.value.param == "model"


# -- what fields' errors say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "temperature = 3 must be less than or equal to 2"),
        ({"n": "2"}, "n", "n = '2' must be a valid integer"),
        ({"stop": ["a", 5]}, "stop", "stop[1] = 5 must be a valid string"),
        ({"stream_options": 5}, "stream_options", "stream_options = 5 must be a JSON object"),
        ({"messages": [5]}, "messages", "messages[0] = 5 must be a JSON object"),
        (
            {"logit_bias": {"x": 1}},
            "logit_bias",
            "logit_bias = {'x': 1} has the key 'x', which is no token id",
        ),
    ],
)
def test_an_error_names_the_field_its_value_and_what_is_accepted(
    client: TestClient, body: dict[str, Any], param: str, message: str
) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], **body}
    response = client.post("/chat", json=fields)
    assert response.status_code == 400
    assert error_of(response)["message"] == message
    assert error_of(response)["param"] == param


def test_a_missing_body_and_another_than_an_object_are_refused(client: TestClient) -> None:
    response = client.post("/chat")
    assert response.status_code == 400
    assert "JSON body is required" in error_of(response)["message"]
    for body in ("[]", "5", '"x"', "null", "true"):
        response = post(client, "/chat", body)
        assert response.status_code == 400, body
        assert error_of(response)["param"] is None


def test_path_and_query_parameters_are_named_too(client: TestClient) -> None:
    assert client.get("/item/5?size=2").json() == {"number": 5, "size": 2}
    response = client.get("/item/x")
    assert (response.status_code, error_of(response)["param"]) == (400, "number")
    response = client.get("/item/5?size=x")
    assert (response.status_code, error_of(response)["param"]) == (400, "size")


def test_a_million_wrong_items_make_one_short_error(client: TestClient) -> None:
    for body in (
        {"stop_token_ids": ["x"] * 200_000},
        {"logit_bias": {f"k{i}": 1 for i in range(100_000)}},
        {f"k{i}": 1 for i in range(100_000)},
        {"messages": [5] * 200_000},
    ):
        response = client.post("/chat", json={"messages": [], **body})
        assert response.status_code == 400
        assert len(error_of(response)["message"]) < 500


def test_shorten_bounds_any_value() -> None:
    assert shorten(5) == "5"
    for value in ("x" * 10**6, ["x" * 1000] * 1000, {"x" * 1000: {"y" * 1000: ["z" * 1000]}}):
        assert len(shorten(value)) <= 120
    assert shorten("\ud800").isascii()


# -- strict JSON -------------------------------------------------------------------------------

DEEPEST = MAX_DEPTH - 1


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1} x',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e400}',
        b'{"a": -1e400}',
        b'{"a": 18446744073709551616}',
        b'{"a": -9223372036854775809}',
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00x"}',
        b'{"\\ud800": 1}',
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
        b"[" * 1_000_000,
        b"[" * (MAX_DEPTH + 1) + b"1" + b"]" * (MAX_DEPTH + 1),
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
    ids=lambda body: repr(body[:25]),
)
def test_what_is_not_strict_json_is_refused(client: TestClient, body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
    response = post(client, "/chat", body)
    assert response.status_code == 400
    assert error_of(response)["message"] == caught.value.message
    assert len(caught.value.message) < 300


def test_strict_json_has_everything_else() -> None:
    text = (
        '{"a": [1, -0.5, 1e3, true, null, "\\ud83d\\ude00 é"], "b": {}, "a": 18446744073709551615}'
    )
    assert parse_json(text.encode()) == json.loads(text)
    deepest = b"[" * DEEPEST + b"1" + b"]" * DEEPEST
    assert parse_json(deepest) == json.loads(deepest)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_body_of_another_content_type_is_refused(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = client.post("/complete", content=b'{"prompt": "Hi"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]
    assert client.post("/complete", content=b'{"prompt": NaN}', headers=headers).status_code == 400


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_a_json_body_is_read(client: TestClient, kind: str) -> None:
    headers = {"content-type": kind}
    response = client.post("/complete", content=b'{"prompt": [[1, 2]]}', headers=headers)
    assert (response.status_code, response.json()) == (200, {"prompts": [[1, 2]]})


def test_a_route_without_a_body_takes_any(client: TestClient) -> None:
    assert client.post("/flush").status_code == 200
    assert client.post("/flush", content=b"{", headers={"content-type": "x"}).status_code == 200


def test_the_openapi_schema_tells_bodies_and_errors(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    operation = schema["paths"]["/chat"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    assert "temperature" in schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "HTTPValidationError" not in schema["components"]["schemas"]
