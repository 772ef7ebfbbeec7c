"""The lines of batch files: requests as they are read, answers as they are written.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}

    {"id": "batch_req_1f..", "custom_id": "a", "error": null,         the request was answered,
     "response": {"status_code": 200, "request_id": .., "body": ..}}  by 200 or an error's status
    {"id": "batch_req_9c..", "custom_id": "b", "response": null,      the line is no request, so
     "error": {"code": "invalid_url", "message": "line 2: ..."}}      that nothing could answer it

`custom_id` is null where the line has none, or has an earlier line's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import msgspec
from pydantic import Field, ValidationError

from ..errors import ApiError, shorten, to_api_error
from ..jsonbody import parse_json
from ..protocol import Body

__all__ = [
    "BatchLine",
    "InputLine",
    "Refusal",
    "answered_line",
    "duplicate",
    "parse_line",
    "read_lines",
    "refused_line",
]

CHUNK = 1 << 20


class BatchLine(Body):
    """A request."""

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class Refusal(NamedTuple):
    """Why a line is no request."""

    custom_id: str | None
    code: str
    message: str


class InputLine(NamedTuple):
    """A line of the input that is not blank."""

    number: int
    """Counts from 1."""
    data: bytes


async def read_lines(file: BinaryIO, max_bytes: int) -> AsyncGenerator[InputLine, None]:
    """The lines of an unbuffered file, read as they are asked for.

    One that is longer than `max_bytes` is cut off somewhere beyond them, and not kept in memory.
    """
    # A thread of its own, which nobody waits for: it may hang on a pipe that nobody writes to.
    thread = ThreadPoolExecutor(1, "read batch")
    loop = asyncio.get_running_loop()
    number, rest = 0, b""
    try:
        while chunk := await loop.run_in_executor(thread, file.read, CHUNK):
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[: max_bytes + 1]
            for data in whole:
                number += 1
                if data.strip():
                    yield InputLine(number, data)
        if rest.strip():
            yield InputLine(number + 1, rest)
    finally:
        thread.shutdown(wait=False)


def parse_line(line: InputLine, max_bytes: int) -> BatchLine | Refusal:
    """The request of a line of at most `max_bytes`; its body is not looked into."""
    number, data = line
    if len(data) > max_bytes:
        message = f"line {number}: it is longer than {max_bytes} bytes (--max-body-size)"
        return Refusal(None, "line_too_long", message)
    try:
        value = parse_json(data)
    except ApiError as error:
        message = error.message.replace("the body", "it", 1)
        return Refusal(None, "invalid_json", f"line {number}: {message}")
    if not isinstance(value, dict):
        message = f"line {number}: {shorten(value)} must be a JSON object"
        return Refusal(None, "invalid_line", message)
    try:
        return BatchLine.model_validate(value)
    except ValidationError as error:
        name, where = value.get("custom_id"), error.errors()[0]["loc"]
        custom_id = name if isinstance(name, str) and name else None
        code = f"invalid_{where[0]}" if where else "invalid_line"
        return Refusal(custom_id, code, f"line {number}: {to_api_error(error).message}")


def duplicate(number: int, custom_id: str) -> Refusal:
    """The refusal of a line with an earlier line's `custom_id`, which stays that line's alone."""
    message = f"line {number}: custom_id = {shorten(custom_id)} is an earlier line's already"
    return Refusal(None, "duplicate_custom_id", message)


def answered_line(custom_id: str, request_id: str, status: int, body: Any) -> bytes:
    """The line of a request that was answered, with success or with an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def refused_line(refusal: Refusal) -> bytes:
    """The line of what is no request."""
    return _line(refusal.custom_id, None, {"code": refusal.code, "message": refusal.message})


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    name = f"batch_req_{secrets.token_hex(16)}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
