"""What a client is told when a request fails: always `{"error": {message, type, param, code}}`.

    any exception --to_api_error--> ApiError --error_response--> JSON, whatever the status

Messages name the field, its value (shortened) and what is accepted. What was not raised on
purpose is logged with its trace, and the client gets a sentence that reveals nothing.
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from minisgl.errors import (
    BusyError,
    EngineDeadError,
    InvalidRequestError,
    MinisglError,
    RequestFailedError,
)

__all__ = [
    "ApiError",
    "ErrorBody",
    "check_model",
    "error_body",
    "error_response",
    "install_error_handlers",
    "prompt_called",
    "shorten",
    "to_api_error",
]

MAX_MESSAGE = 2000
"""Characters of an error's message: a chat template's own words may be as long as the prompt."""
RETRY_AFTER_S = 1

log = logging.getLogger(__name__)


class _Json(reprlib.Repr):
    """`repr`, shortened, of values as they stood in the JSON that clients sent."""

    def repr1(self, value: Any, level: int) -> str:
        """One value, `level` more allowed inside it."""
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        return super().repr1(value, level)


_shortener = _Json()
_shortener.maxstring = 100
_shortener.maxlevel = 3
_shortener.maxlist = _shortener.maxdict = 4


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """A failure as the client sees it; `param` names the parameter at fault, if it is one.

    `type` is by default OpenAI's: `invalid_request_error` below status 500, else `server_error`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object for an error; can always be encoded as UTF-8."""
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    message = message.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    return {
        "error": {
            "message": message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> JSONResponse:
    """The HTTP response for an error."""
    return JSONResponse(error_body(error), error.status, error.headers)


def check_model(name: str | None, served: str) -> None:
    """Raise a 404 if a request asks for another model than the one served; None asks for any."""
    if name is not None and name != served:
        raise ApiError(
            404,
            f"model = {shorten(name)} is not served here, only {shorten(served)}: name it, or none",
            param="model",
            code="model_not_found",
        )


@contextmanager
def prompt_called(name: str) -> Iterator[None]:
    """What is wrong with the prompt is said of the parameter that has it in this request."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "prompt":
            error.param = name
        raise


def to_api_error(error: Exception) -> ApiError:
    """How a client is told of `error`; what was not expected is logged with its trace."""
    known = _known(error)
    if known is None:
        log.error("a request failed unexpectedly", exc_info=error)
        return _unexpected()
    return known


def install_error_handlers(app: FastAPI) -> None:
    """Answer everything that fails in `app`, unknown routes included, by an error body."""
    # Starlette looks a handler up by the exception's classes, most derived first. It logs and
    # raises again only what falls through to the handler for `Exception`.
    for kind in (ApiError, MinisglError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _handle_unexpected)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        return error_response(_no_route(request, error))
    return error_response(to_api_error(error))


async def _handle_unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this response, and the server logs it.
    return error_response(_unexpected())


def _unexpected() -> ApiError:
    return ApiError(500, "the server failed on this request; its log says why", code="internal")


def _known(error: Exception) -> ApiError | None:
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param)
        case ValidationError() | RequestValidationError():
            return _invalid_field(error.errors())
        case BusyError():
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return ApiError(
                503, str(error), type="server_busy", code="server_busy", headers=headers
            )
        case EngineDeadError():
            message = "the engine died and the server is ending; its log says why"
            return ApiError(503, message, code="engine_dead")
        case RequestFailedError():
            return ApiError(500, str(error), code="request_failed")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return None


def _no_route(request: Request, error: HTTPException) -> ApiError:
    """A 404 or 405 of the router, which only says "Not Found" or "Method Not Allowed"."""
    message = str(error.detail)
    if message == HTTPStatus(error.status_code).phrase:
        asked = f"{request.method} {shorten(request.url.path).strip(chr(39))}"
        allowed = (error.headers or {}).get("Allow")
        message = f"there is no {asked}"
        message += f": its methods are {allowed}" if allowed else " here; /docs lists what is"
    return ApiError(error.status_code, message, headers=error.headers)


# -- what pydantic found -----------------------------------------------------------------------

_OBJECT_ERRORS = {"dict_type", "model_type", "model_attributes_type", "dict_attributes_type"}


def _invalid_field(errors: Sequence[Any]) -> ApiError:
    """The first error that pydantic found, in one sentence."""
    first = errors[0]
    loc = [part for part in first["loc"] if part != "[key]"]
    if loc and loc[0] in ("body", "query", "path", "header", "cookie"):
        loc = loc[1:]  # FastAPI's: where the value was
    path = _dotted(loc)
    kind, cause = first["type"], first.get("ctx", {}).get("error")
    param = str(loc[0]) if loc else None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {cause}")
    if isinstance(cause, InvalidRequestError):
        return ApiError(400, f"{path}: {cause}" if path else str(cause), param=param or cause.param)
    if kind == "missing":
        return ApiError(400, f"{path or 'a JSON body'} is required", param=param)
    given = f"{path or 'the body'} = {shorten(first['input'])}"
    if kind in _OBJECT_ERRORS:
        reason = "must be a JSON object"
    elif isinstance(cause, ValueError):
        reason = str(cause)
    else:
        reason = re.sub(r"^\w+ should ", "must ", first["msg"])
    return ApiError(400, f"{given} {reason}", param=param)


def _dotted(loc: Sequence[int | str]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{shorten(part)[1:-1]}"
    return path.removeprefix(".")


def shorten(value: object) -> str:
    """`repr` of a value in about 100 characters, however large it is."""
    text = _shortener.repr(value)
    return text if len(text) <= 120 else text[:80] + "..." + text[-20:]
