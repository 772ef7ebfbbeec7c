"""A server for the chat to talk to, whose answers are scripted bytes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from minisgl.shell.loop import LoopThread


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def said(text: str | None, finish_reason: str | None = None, **delta: Any) -> bytes:
    """A chunk as OpenAI sends it, with fields that nobody here reads."""
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish_reason}
    return event({"id": "x", "object": "chat.completion.chunk", "choices": [choice], "usage": None})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"
HANG = object()
"""In an answer: nothing comes any more, but the connection stays."""
BREAK = object()
"""In an answer: the connection breaks."""


class Stub:
    """A server that answers with scripted pieces of bytes, or a whole `web.Response`."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.models: Any = {"object": "list", "data": [{"id": "first", "max_model_len": 64}]}
        self.models_status = 200
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.on_request: Callable[[], None] = lambda: None
        self.client_left = threading.Event()
        self._loop = LoopThread()
        self.port = self._loop.run(self._start())

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.run(self._runner.cleanup())
        self._loop.close()

    def stop_listening(self) -> None:
        self._loop.run(self._runner.cleanup())

    async def _list(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response(self.models, status=self.models_status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        try:
            self.on_request()
            if isinstance(answer, web.Response):
                return answer
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            for piece in answer:
                if piece is HANG:
                    await asyncio.Event().wait()
                elif piece is BREAK:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                else:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(piece)
            return response
        except asyncio.CancelledError:
            self.client_left.set()
            raise
