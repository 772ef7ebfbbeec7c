"""The HTTP application: routes, error bodies, keys, limits."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl import __version__

from . import info, native, openai
from .context import ServerContext, ServerState
from .errors import install_error_handlers
from .metrics import Metrics
from .security import ApiKeyMiddleware, BodyLimitMiddleware

__all__ = ["CountRequests", "make_app"]


def make_app(context: ServerContext) -> FastAPI:
    """All routes over one engine, which may still be loading: they answer 503 until it is ready."""
    app = FastAPI(
        title="minisgl",
        version=__version__,
        description="An OpenAI-compatible server for one model.",
        # Only for /openapi.json: the middleware below is what checks it, before any route does.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if context.config.api_key else [],
    )
    install_error_handlers(app)
    for module in (openai, info, native):
        app.include_router(module.router(context))
    app.add_middleware(BodyLimitMiddleware, max_bytes=context.config.max_body_size)
    if context.config.api_key is not None:  # outermost: a body is only read for those with a key
        app.add_middleware(ApiKeyMiddleware, key=context.config.api_key)
    return app


class CountRequests:
    """Counts open requests, and the responses that are errors. Around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: Metrics) -> None:
        self._app = app
        self._state = state
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.on_error(message["status"])
            await send(message)

        self._state.num_requests += 1
        try:
            await self._app(scope, receive, counting)
        finally:
            self._state.num_requests -= 1
