"""Each kind of failure: its status, its body, its headers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.answers import CHAT, COMPLETIONS, HELLO, ok, prompt_of, refused
from tests.server.conftest import API_KEY, TIMEOUT_S
from tests.server.serving import Server

JSON = {"content-type": "application/json"}
KEY = {"authorization": f"Bearer {API_KEY}"}
BODIES = (
    CHAT,
    COMPLETIONS,
    "/generate",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/abort_request",
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def stranger(guarded_server: Server) -> Iterator[httpx.Client]:
    """A client of the guarded server without its key."""
    with httpx.Client(base_url=guarded_server.url, timeout=TIMEOUT_S) as client:
        yield client


# ---- 400: the body as such ----------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"user": "\\ud800"}',
        b'{"user": "\\udc00\\ud800"}',
        b'{"user": "\xff"}',
        b'{"user": "\xed\xa0\x80"}',
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b'{"a": 1} {"b": 2}',
    ],
    ids=lambda body: ascii(body[:28])[2:-1],
)
def test_what_is_no_json_object_is_refused(tiny: httpx.Client, path: str, body: bytes) -> None:
    refused(tiny.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_parameter_is_refused_by_name(tiny: httpx.Client, path: str) -> None:
    text = {"tokens": [1]} if path == "/detokenize" else {"prompt": "a"}
    body = {"rid": "a"} if path == "/abort_request" else text
    body = {"text": "a"} if path == "/generate" else body
    message = refused(tiny.post(path, json={"temprature": 1, **body}), param="temprature")
    assert "temprature" in message


def test_unknown_names_by_the_million_get_one_short_answer(tiny: httpx.Client) -> None:
    body = {f"name{i}": None if i % 2 else i for i in range(1, 200_000)}
    message = refused(tiny.post(CHAT, json={**prompt_of(CHAT), **body}), param="name2")
    assert len(message) < 200


# ---- 400: messages ------------------------------------------------------------------------------


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {},
        ["hello"],
        [{}],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None}],
        [{"role": "robot", "content": "x"}],
        [{"role": 1, "content": "x"}],
        user(1),
        user([IMAGE]),
        user([{"type": "text", "text": "x"}, IMAGE]),
        user([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
        user([{"type": "text"}]),
        user([{"type": "text", "text": 1}]),
        user(["x"]),
        [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "1"}],
    ],
    ids=lambda messages: ascii(messages)[:50],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_messages_that_cannot_be_taken(tiny: httpx.Client, path: str, messages: Any) -> None:
    refused(tiny.post(path, json={"messages": messages}), param="messages")


def test_missing_messages_and_prompts_are_named(tiny: httpx.Client) -> None:
    assert "required" in refused(tiny.post(CHAT, json={}), param="messages")
    assert "required" in refused(tiny.post(COMPLETIONS, json={}), param="prompt")
    refused(tiny.post(CHAT, json={"prompt": "hello"}), param="prompt")
    refused(tiny.post(COMPLETIONS, json={"messages": HELLO, "prompt": "a"}), param="messages")


def test_the_template_itself_says_why_it_refuses(tiny: httpx.Client) -> None:
    messages = [{"role": "tool", "content": "x"}]
    message = refused(tiny.post(CHAT, json={"messages": messages}), param="messages")
    assert "Tools have no say here" in message


def test_a_long_value_is_not_repeated_in_full(tiny: httpx.Client) -> None:
    message = refused(tiny.post(CHAT, json={**prompt_of(CHAT), "temperature": "x" * 100_000}))
    assert len(message) < 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options"),
    ],
)
def test_what_is_not_there_is_refused_and_not_ignored(
    tiny: httpx.Client, body: dict[str, Any], param: str
) -> None:
    refused(tiny.post(CHAT, json={**prompt_of(CHAT), **body}), param=param)


@pytest.mark.parametrize("given", ["", "x" * 129, "é"])
def test_a_request_id_that_could_not_come_back_is_refused(tiny: httpx.Client, given: str) -> None:
    headers = {b"x-request-id": given.encode("utf-8")}
    refused(tiny.post(CHAT, json=prompt_of(CHAT), headers=headers), param="x-request-id")


# ---- 401 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/docs", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": API_KEY},
        {"authorization": f"Basic {API_KEY}"},
        {"authorization": f"Bearer {API_KEY}x"},
        {"x-api-key": "wrong"},
    ],
    ids=str,
)
def test_without_the_key_nothing_is_told(
    stranger: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    response = stranger.get(path, headers=headers)
    refused(response, 401, code="invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert API_KEY not in response.text


def test_health_needs_no_key_and_either_header_has_it(stranger: httpx.Client) -> None:
    for path in ("/health", "/health_generate"):
        assert ok(stranger.get(path)) == {"status": "ok"}
    for headers in (KEY, {"authorization": f"bearer {API_KEY}"}, {"x-api-key": API_KEY}):
        ok(stranger.get("/v1/models", headers=headers))
    body = {**prompt_of(CHAT), "max_tokens": 1}
    refused(stranger.post(CHAT, json=body), 401)
    ok(stranger.post(CHAT, json=body, headers=KEY))


# ---- 404, 405, 413, 415 --------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_404(tiny: httpx.Client, path: str) -> None:
    response = tiny.post(path, json={**prompt_of(path), "model": "gpt-4"})
    assert "gpt-4" in refused(response, 404, param="model", code="model_not_found")
    refused(tiny.get("/v1/models/gpt-4"), 404, param="model", code="model_not_found")


def test_unknown_routes_and_methods(tiny: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/embeddings", "/v2/models", "/..%2f..%2fetc/passwd"):
        refused(tiny.get(path), 404)
    for method, path in (("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/health")):
        response = tiny.request(method, path)
        refused(response, 405)
        assert response.headers["allow"]


def test_a_body_above_the_limit_is_413(guarded: httpx.Client) -> None:
    body = {**prompt_of(COMPLETIONS), "user": "x" * 5000}
    message = refused(guarded.post(COMPLETIONS, json=body), 413)
    assert "4096" in message

    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * 1000

    refused(guarded.post(COMPLETIONS, content=pieces(), headers=JSON), 413)


def test_a_body_that_does_not_claim_to_be_json_is_415(tiny: httpx.Client) -> None:
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data"}):
        response = tiny.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=kind)
        assert "application/json" in refused(response, 415)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx-a: \x01\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_like_all_else(tiny_server: Server, head: bytes) -> None:
    address = urlsplit(tiny_server.url)
    with socket.create_connection((address.hostname, address.port), TIMEOUT_S) as connection:
        connection.sendall(head)
        response = HTTPResponse(connection)
        response.begin()
        body, headers = response.read(), dict(response.getheaders())
    refused(httpx.Response(response.status, headers=headers, content=body))


# ---- 503, and the server's own limits -----------------------------------------------------------


def test_a_full_queue_is_503_until_there_is_room(guarded: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with guarded.stream("POST", COMPLETIONS, json=body) as running:
        assert running.status_code == 200
        lines = running.iter_lines()
        next(lines)
        for path, request in (
            (CHAT, {**prompt_of(CHAT), "stream": True}),
            (COMPLETIONS, prompt_of(COMPLETIONS)),
            ("/generate", {"text": "a"}),
        ):
            full = guarded.post(path, json=request)
            refused(full, 503, type="server_busy", code="server_busy")
            assert int(full.headers["retry-after"]) >= 1
        assert ok(guarded.get("/health")) == {"status": "ok"}  # busy is not ill
        assert ok(guarded.post("/abort_request", json={"abort_all": True})) == {"aborted": 1}
        *_, last, done = filter(None, lines)
    assert done == "data: [DONE]" and '"finish_reason":"abort"' in last
    ok(guarded.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}))


def test_more_sequences_than_the_server_ever_holds_are_refused_for_good(
    guarded: httpx.Client,
) -> None:
    def ask(**body: Any) -> httpx.Response:
        return guarded.post(COMPLETIONS, json={"prompt": "a", **body})

    refused(ask(n=5), param="n")  # --max-n 4
    refused(ask(n=2), param="n")
    refused(ask(prompt=["a", "b"]), param="prompt")
