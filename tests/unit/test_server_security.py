from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.security import ApiKeyMiddleware, BodyLimitMiddleware

KEY = "sk-ключ"
Headers = list[tuple[bytes, bytes]]


class Answer(NamedTuple):
    status: int | None
    headers: dict[bytes, bytes]
    body: bytes
    num_read: int
    """Messages that were taken from the client."""


def ask(
    app: ASGIApp,
    *,
    path: str = "/v1/models",
    headers: Iterable[tuple[bytes, bytes]] = (),
    chunks: Iterable[bytes] = (b"",),
) -> Answer:
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": list(headers),
        "query_string": b"",
    }
    parts = list(chunks)
    sent: list[Message] = []
    num_read = 0

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        more = num_read < len(parts)
        return {"type": "http.request", "body": parts[num_read - 1], "more_body": more}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) <= 1
    body = b"".join(message.get("body", b"") for message in sent)
    status = starts[0]["status"] if starts else None
    return Answer(status, dict(starts[0]["headers"]) if starts else {}, body, num_read)


async def read_body(receive: Receive) -> int:
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    return size


async def reply(send: Send, status: int, text: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": text})


async def counting_app(scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, 200, str(await read_body(receive)).encode())


# -- keys --------------------------------------------------------------------------------------

KEYED = ApiKeyMiddleware(counting_app, KEY)
BYTES = KEY.encode()


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer " + BYTES)],
        [(b"authorization", b"bearer   " + BYTES + b" ")],
        [(b"x-api-key", BYTES)],
        [(b"authorization", b"Basic abc"), (b"x-api-key", BYTES)],
    ],
)
def test_the_key_opens_every_path(headers: Headers) -> None:
    assert ask(KEYED, headers=headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", BYTES)],
        [(b"authorization", b"Basic " + BYTES)],
        [(b"authorization", b"Bearer " + BYTES[:-1])],
        [(b"authorization", b"Bearer " + BYTES + b"x")],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"\xff" * 10_000)],
    ],
)
def test_without_the_key_it_is_401(headers: Headers) -> None:
    answer = ask(KEYED, headers=headers)
    assert answer.status == 401
    assert answer.num_read == 0
    assert answer.headers[b"www-authenticate"] == b"Bearer"
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"


def test_health_needs_no_key() -> None:
    assert ask(KEYED, path="/health").status == 200
    assert ask(KEYED, path="/health_generate").status == 200
    for path in ("/health/", "/healthy", "/HEALTH", "//health", "/metrics", "/docs"):
        assert ask(KEYED, path=path).status == 401, path


def test_the_lifespan_passes_both_middlewares() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    wrapped: Any = BodyLimitMiddleware(ApiKeyMiddleware(app, KEY), 1)
    asyncio.run(wrapped({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


# -- body sizes --------------------------------------------------------------------------------

LIMITED = BodyLimitMiddleware(counting_app, 10)


def assert_is_413(answer: Answer) -> None:
    assert answer.status == 413
    error = json.loads(answer.body)["error"]
    assert "10 bytes" in error["message"] and "--max-body-size" in error["message"]


@pytest.mark.parametrize("chunks", [[b""], [b"x" * 10], [b"x" * 4, b"", b"x" * 6]])
def test_a_body_up_to_the_limit_is_passed_on(chunks: list[bytes]) -> None:
    size = sum(map(len, chunks))
    answer = ask(LIMITED, chunks=chunks, headers=[(b"content-length", b"%d" % size)])
    assert (answer.status, answer.body) == (200, b"%d" % size)


@pytest.mark.parametrize("length", [b"11", b"0011", b"9" * 10_000])
def test_a_body_said_to_be_larger_is_refused_unread(length: bytes) -> None:
    answer = ask(LIMITED, headers=[(b"content-length", length)], chunks=[b"x" * 11])
    assert_is_413(answer)
    assert answer.num_read == 0


@pytest.mark.parametrize("length", [None, b"5", b"-1", b"x", b"\xff", b""])
def test_a_body_that_turns_out_larger_is_refused_as_it_comes(length: bytes | None) -> None:
    headers = [] if length is None else [(b"content-length", length)]
    answer = ask(LIMITED, headers=headers, chunks=[b"x" * 6] * 100)
    assert_is_413(answer)
    assert answer.num_read == 2


def test_an_application_that_answers_its_failed_read_still_gives_413() -> None:
    async def swallows(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await read_body(receive)
        except Exception:
            await reply(send, 400, b"can't read")

    assert_is_413(ask(BodyLimitMiddleware(swallows, 10), chunks=[b"x" * 11]))


def test_an_answer_that_has_begun_is_not_answered_twice() -> None:
    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await read_body(receive)

    with pytest.raises(Exception, match="10 bytes"):
        ask(BodyLimitMiddleware(hasty, 10), chunks=[b"x" * 11])


def test_errors_of_the_application_pass_through() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(BodyLimitMiddleware(broken, 10))
