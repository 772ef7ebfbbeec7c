"""What is asked of the server's answers in several tests."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import httpx

from tests.server.serving import ROOT

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def strict_json(text: str) -> Any:
    """The value of a JSON text that has neither NaN nor infinities."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} in {text}")

    return json.loads(text, parse_constant=refuse)


def ok(response: httpx.Response) -> Any:
    """The body of a success, whose status is exactly 200."""
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def refused(response: httpx.Response, status: int = 400, **fields: Any) -> str:
    """The message of an error; `fields` are those of its body that are asked for."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = strict_json(response.text)
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert {name: error[name] for name in fields} == fields, error
    if status < 500:
        assert error["type"] == "invalid_request_error"
    message = error["message"]
    assert isinstance(message, str) and message
    for secret in ("Traceback", 'File "', ".py", str(ROOT), "/tmp/"):
        assert secret not in message
    return message


def prompt_of(path: str) -> dict[str, Any]:
    """The smallest request of an endpoint."""
    return {"messages": HELLO} if path == CHAT else {"prompt": "hello"}


def events(text: str) -> list[Any]:
    """The objects of an event stream, which is as it must be and ends by `[DONE]`."""
    *parts, rest = text.split("\n\n")
    assert rest == "" and parts[-1] == "data: [DONE]", text[-200:]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [strict_json(part.removeprefix("data: ")) for part in parts[:-1]]
