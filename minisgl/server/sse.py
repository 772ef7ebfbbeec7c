"""Answering a client, whole or as server-sent events, for as long as it is there.

    route ──> CallResponse(start) ──> call = await start() ──> response() or chunks() ──> client
                     └── watches the connection: when the client goes, all of it is cancelled,
                         and leaving the call's `async with` block aborts its sequences

Everything after the request is read happens inside `CallResponse`, so that there is no moment
at which sequences run and nobody watches. Nothing is sent before the first chunk (or the whole
response) is there: an error until then leaves as an ordinary error response, a later one as an
event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import error_body, to_api_error

__all__ = ["DONE", "STREAM_CONTENT", "Call", "CallResponse", "event"]

DONE = b"data: [DONE]\n\n"
STREAM_CONTENT = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "description": "An event, when `stream` is set.",
            "properties": {
                "data": {"type": "string", "description": "A JSON object; `[DONE]` in the last."}
            },
            "required": ["data"],
        }
    }
}
"""Of a response in `/openapi.json`, besides its JSON."""


class Call(AbstractAsyncContextManager["Call"], Protocol):
    """A submitted request; leaving its `async with` block aborts what has not ended."""

    @property
    def request_id(self) -> str:
        """What the engine knows it by; the client may choose it. Printable ASCII."""
        ...

    @property
    def stream(self) -> bool:
        """Whether the client asked for `chunks` instead of a `response`."""
        ...

    async def response(self) -> Any:
        """The whole answer, as something that msgspec writes as JSON."""
        ...

    def chunks(self) -> AsyncGenerator[list[Any], None]:
        """What is to be sent, by turns of one chunk or more."""
        ...


def event(data: Any) -> bytes:
    """A server-sent event with `data` as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class CallResponse(Response):
    """The response to the call that `start` submits; see the module."""

    def __init__(self, start: Callable[[], Awaitable[Call]]) -> None:
        super().__init__()
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until the client goes away."""
        await _while_connected(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        async with await self._start() as call:
            if call.stream:
                await _send_events(call, send)
            else:
                body = msgspec.json.encode(await call.response())
                kind = {"content-type": "application/json", "content-length": str(len(body))}
                await send(_head(call, kind))
                await send({"type": "http.response.body", "body": body})


async def _send_events(call: Call, send: Send) -> None:
    started = False
    try:
        async with aclosing(call.chunks()) as turns:
            async for chunks in turns:
                if not started:
                    started = True
                    await send(_head(call, _EVENT_STREAM))
                await send(_body(b"".join(map(event, chunks))))
    except Exception as error:
        if not started:
            raise
        await send(_body(event(error_body(to_api_error(error)))))
    await send(_body(DONE, more=False))


_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events
}


def _head(call: Call, headers: dict[str, str]) -> dict[str, Any]:
    named = {**headers, "x-request-id": call.request_id}
    pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in named.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


def _body(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but cancel it when the client disconnects."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()  # raises its error
    finally:  # also when this task is cancelled itself
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone; the request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
