"""Calls of a router's routes without a socket, on a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI

from minisgl.server.context import ServerContext
from minisgl.server.errors import install_error_handlers
from minisgl.server.metrics import Metrics
from tests.unit.fake_async_engine import FakeAsyncEngine, fake_context

MakeRouter = Callable[[ServerContext], APIRouter]


class Routes:
    """An app of one router; `config` are fields of `ServerConfig`."""

    def __init__(
        self,
        make_router: MakeRouter,
        engine: FakeAsyncEngine | None = None,
        *,
        model_name: str = "fake",
        **config: Any,
    ) -> None:
        self.engine = engine or FakeAsyncEngine()
        context = fake_context(self.engine, **config)
        self.context = replace(context, model_name=model_name, metrics=Metrics(model_name))
        self.app = FastAPI()
        install_error_handlers(self.app)
        self.app.include_router(make_router(self.context))

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request, in a running event loop."""
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    def get(self, path: str) -> httpx.Response:
        """One GET."""
        return asyncio.run(self.call("GET", path))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One POST of a JSON body."""
        return asyncio.run(self.call("POST", path, json=body, **options))


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response that must have failed with this status."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
