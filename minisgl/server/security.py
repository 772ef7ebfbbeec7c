"""ASGI middlewares that refuse requests before any route reads them: keys and body sizes."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response

__all__ = ["OPEN_PATHS", "ApiKeyMiddleware", "BodyLimitMiddleware"]

OPEN_PATHS = frozenset({"/health", "/health_generate"})
"""What load balancers ask without a key."""


class ApiKeyMiddleware:
    """Answers 401 to requests without the key, as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request if it may be."""
        is_request = scope["type"] in ("http", "websocket")
        if not is_request or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "no or wrong API key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Whether one of the headers holds the key; all bytes are compared in constant time."""
        found = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, value = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            elif name != b"x-api-key":
                continue
            # Digests have one length, so that the comparison tells nothing of the key's.
            found |= hmac.compare_digest(_digest(value.strip()), self._digest)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimitMiddleware:
    """Answers 413 to bodies of more than `max_bytes`: by their header, else while they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request unless its body is too large."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and self._exceeds(length):
            await error_response(self._error())(scope, receive, send)
            return
        await self._serve_counting(scope, receive, send)

    def _exceeds(self, length: str) -> bool:
        """Compare without `int`, which refuses thousands of digits."""
        digits, limit = length.lstrip("0"), str(self.max_bytes)
        return (len(digits), digits) > (len(limit), limit)

    async def _serve_counting(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body as it comes, and answer in the application's place if it is too large.

        The application may turn the error that its `receive` raises into an answer of its own,
        or let it through: either way the client gets the 413, unless an answer has begun.
        """
        num_bytes = 0
        too_large = started = False

        async def receive_counting() -> Message:
            nonlocal num_bytes, too_large
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                too_large = True
                raise self._error()
            return message

        async def send_unless_refused(message: Message) -> None:
            nonlocal started
            if too_large and not started:
                return
            started = True
            await send(message)

        try:
            await self.app(scope, receive_counting, send_unless_refused)
        except ApiError:
            if not too_large or started:
                raise
        if too_large and not started:
            await error_response(self._error())(scope, receive, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self.max_bytes} bytes, this server's --max-body-size",
            code="body_too_large",
        )
