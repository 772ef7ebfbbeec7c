"""Calls of SGLang's native API over HTTP, on a fake engine."""

from __future__ import annotations

import json
from typing import Any

from minisgl.server import native
from tests.unit.fake_async_engine import FakeAsyncEngine
from tests.unit.routes import Routes


def routes(engine: FakeAsyncEngine | None = None, **options: Any) -> Routes:
    return Routes(native.router, engine, **options)


def generate(server: Routes, **body: Any) -> Any:
    response = server.post("/generate", {"text": "ab", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Routes, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, without its end, which must be there."""
    response = server.post("/generate", {"text": "ab", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]
