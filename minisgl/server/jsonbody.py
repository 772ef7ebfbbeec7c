"""Strict JSON bodies: what RFC 8259 does not have, or no parameter can hold, is a 400.

`StrictRoute` goes under FastAPI's ordinary body parameters, so that `/openapi.json` stays true:
`APIRouter(route_class=StrictRoute)`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from .errors import ApiError, ErrorBody, shorten

if TYPE_CHECKING:
    from fastapi._compat import ModelField

__all__ = ["StrictRoute", "parse_json"]

MAX_DEPTH = 64
"""Objects and lists in each other; deeper ones would exhaust a recursion further on."""
MAX_VALUES = 1_000_000
"""In one body: no context has as many token ids. Each costs far more here than its few bytes."""
LARGE_BYTES = 1 << 16
"""Longer bodies are read in a thread: others needn't wait."""

_STRING = re.compile(rb'"[^"]*"?')
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def parse_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises a 400 `ApiError` for anything else: NaN and infinities, numbers too large for a float
    or 64 bits, lone surrogates, nesting deeper than `MAX_DEPTH`, more than `MAX_VALUES` values.
    """
    if _most_values(body) > MAX_VALUES and _has_too_many(body):
        raise ApiError(
            400, f"the body has more than {MAX_VALUES} values: send several smaller requests"
        )
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:  # its subject is a number in valid JSON
        raise ApiError(400, f"the body has a number that is too large: {error}") from None
    except msgspec.DecodeError as error:
        if half := _SURROGATE.search(_PAIR.sub(b"", body.replace(rb"\\", b""))):
            escape = half[0].decode()
            raise ApiError(
                400, f"a string has the lone surrogate {escape}, which is no character: remove it"
            ) from None
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}") from None
    _check_values(value)
    return value


def _most_values(body: bytes, begin: int = 0, end: int | None = None) -> int:
    """As many values at most: each but the first is behind a comma or begins a list or object."""
    return 1 + sum(body.count(mark, begin, end) for mark in (b",", b"[", b"{"))


def _has_too_many(body: bytes) -> bool:
    """Count again without what is in strings, which may have any of those marks.

    Before the values are made: millions of them take long, and the parser lets nobody else run.
    """
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    count, end = 1, 0
    for string in _STRING.finditer(body):
        count += _most_values(body, end, string.start()) - 1
        end = string.end()
        if count > MAX_VALUES:
            return True
    return count + _most_values(body, end) - 1 > MAX_VALUES


def _check_values(value: Any) -> None:
    """Bound the depth and the integers of a parsed value, level by level."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                below += item.values()
            elif kind is list:
                below += item
            elif kind is int and not -(2**63) <= item < 2**64:
                raise ApiError(400, f"the body has a number beyond 64 bits: {shorten(item)}")
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body nests objects and lists more than {MAX_DEPTH} deep")


class _StrictRequest(Request):
    """A request whose `json()` was parsed ahead, and is the endpoint's parameter already.

    Ahead, because FastAPI turns what `json()` raises into an error that no longer says why, and
    validates in the event loop, however much there is.
    """

    _value: Any = None

    async def parse(self, field: ModelField) -> None:
        """Read, parse and validate the body, if there is one."""
        try:
            body = await self.body()
        except ClientDisconnect:
            raise ApiError(400, "the connection closed before the end of the body") from None
        if len(body) > LARGE_BYTES:
            await asyncio.to_thread(self._read, body, field)
        elif body:
            self._read(body, field)

    def _read(self, body: bytes, field: ModelField) -> None:
        value = parse_json(body)  # first: its faults say more than the header's
        self._check_content_type()
        self._value, errors = field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors)

    def _check_content_type(self) -> None:
        # Not only for form's sake: a page on the web can make a browser send JSON to this
        # machine under other types, or none, without asking; for this one it must ask first.
        given = self.headers.get("content-type", "")
        media = given.partition(";")[0].strip().lower()
        is_json = media.startswith("application/") and media.endswith(("/json", "+json"))
        if not is_json:
            raise ApiError(
                415,
                f"Content-Type = {shorten(given)}: send the body as application/json",
            )

    async def json(self) -> Any:
        return self._value


class StrictRoute(APIRoute):
    """A route whose JSON body, if it takes one, is read strictly."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        errors = {status: {"model": ErrorBody} for status in ("4XX", "5XX")}
        options["responses"] = {**errors, **(options.get("responses") or {})}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        """FastAPI's handler, given a request that is parsed already."""
        handler = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handler

        async def handle(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            await strict.parse(field)
            return await handler(strict)

        return handle
