"""Lines of batches, and what was written about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]


def line(custom_id: Any, body: Any = None, **changes: Any) -> Json:
    """A request for a completion; None leaves a field out."""
    fields = {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": body, **changes}
    fields["body"] = {"prompt": "Hi"} if body is None else body
    return {name: value for name, value in fields.items() if value is not None}


def file_of(lines: Sequence[Json | bytes]) -> bytes:
    return b"".join(
        (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines
    )


def written(path: Path) -> list[Json]:
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(item) for item in data.splitlines()]


def outcomes(path: Path) -> dict[str | None, int | str]:
    """Of lines with different `custom_id`s, the status or the error's code."""
    found = {}
    for item in written(path):
        assert set(item) == {"id", "custom_id", "response", "error"}
        assert (item["response"] is None) != (item["error"] is None)
        error, response = item["error"], item["response"]
        assert item["custom_id"] not in found
        found[item["custom_id"]] = error["code"] if error else response["status_code"]
    return found
