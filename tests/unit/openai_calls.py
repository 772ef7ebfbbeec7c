"""Calls of the two OpenAI endpoints over an engine that plays scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from fastapi import FastAPI

from minisgl.server.context import ServerContext
from minisgl.server.errors import install_error_handlers
from minisgl.server.openai import router
from tests.unit.fake_async_engine import FakeAsyncEngine, fake_context

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
Json = dict[str, Any]


def app_of(context: ServerContext) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(router(context))
    return app


async def post(
    engine: FakeAsyncEngine, path: str, body: Json, headers: Json | None = None, **config: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(fake_context(engine, **config)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body, headers=headers)


def ask(
    engine: FakeAsyncEngine, path: str, body: Json, headers: Json | None = None, **config: Any
) -> httpx.Response:
    return asyncio.run(post(engine, path, body, headers, **config))


def events(text: str) -> list[Json]:
    """The events of a stream without the `[DONE]` that ends it."""
    *data, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in data)
    return [json.loads(event.removeprefix("data: ")) for event in data]


def stream(engine: FakeAsyncEngine, path: str, body: Json) -> list[Json]:
    response = ask(engine, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return events(response.text)


def error_of(response: httpx.Response) -> Json:
    body = response.json()
    assert set(body) == {"error"}
    error: Json = body["error"]
    return error


class Connection:
    """A client of an ASGI app, one message at a time."""

    def __init__(self, app: FastAPI, path: str, body: Json) -> None:
        self.sent: asyncio.Queue[Json] = asyncio.Queue()
        self._received: asyncio.Queue[Json] = asyncio.Queue()
        self._received.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        }
        call: Any = app(scope, self._received.get, self.sent.put)
        self.task: asyncio.Task[None] = asyncio.ensure_future(call)

    def leave(self) -> None:
        self._received.put_nowait({"type": "http.disconnect"})


async def until(condition: Callable[[], object]) -> None:
    """Let everything else run until something holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")
