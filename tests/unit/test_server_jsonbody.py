"""Large JSON bodies: bounded, and read without the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import model_validator

from minisgl.server import jsonbody
from minisgl.server.errors import ApiError, install_error_handlers
from minisgl.server.jsonbody import StrictRoute, parse_json
from minisgl.server.protocol import Body

MOST = 10


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jsonbody, "MAX_VALUES", MOST)
    yield


@pytest.mark.parametrize(
    "body",
    [
        "[" + ",".join(["1"] * MOST) + "]",
        "[" + ",".join(["{}"] * MOST) + "]",
        "{" + ",".join(f'"a,[{{{i}": 0' for i in range(MOST)) + "}",
        "[" * (MOST + 1) + "]" * (MOST + 1),
        "[[],[[1,2]],{},3,4,5,6]",
        '["\\\\", ' + ",".join(["1"] * MOST) + "]",
        '["\\"", ' + ",".join(["1"] * MOST) + "]",
    ],
)
def test_one_value_too_many_is_refused(body: str, few: None) -> None:
    with pytest.raises(ApiError, match="more than 10 values") as caught:
        parse_json(body.encode())
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("[" + ",".join(["1"] * (MOST - 1)) + "]", [1] * (MOST - 1)),
        ('["' + ",[{" * MOST + '"]', [",[{" * MOST]),
        ('["\\"' + ",[{" * MOST + '\\\\", ",,,,,,,,,,"]', ['"' + ",[{" * MOST + "\\", "," * 10]),
        ('{"' + "," * MOST + '": "' + "[" * MOST + '"}', {"," * MOST: "[" * MOST}),
    ],
)
def test_what_is_in_strings_does_not_count(body: str, value: Any, few: None) -> None:
    assert parse_json(body.encode()) == value


@pytest.mark.parametrize("body", ['["' + "," * 20, '["' + ",\\" * 20])
def test_strings_that_do_not_end_are_no_json(body: str, few: None) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json(body.encode())


# -- in a thread -------------------------------------------------------------------------------


def post(text: str, **more: Any) -> tuple[httpx.Response, list[bool]]:
    """The answer to a body, and whether each validation was in the event loop's thread."""
    in_loop: list[bool] = []

    class Given(Body):
        text: str

        @model_validator(mode="before")
        @classmethod
        def _see(cls, data: Any) -> Any:
            if isinstance(data, dict):
                in_loop.append(threading.current_thread() is threading.main_thread())
            return data

    routes = APIRouter(route_class=StrictRoute)

    async def length(body: Given) -> int:
        return len(body.text)

    length.__annotations__["body"] = Given  # a name that only this function knows
    routes.post("/length")(length)
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(routes)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/length", json={"text": text, **more})

    return asyncio.run(run()), in_loop


def test_a_large_body_is_read_in_a_thread_and_a_small_one_at_once() -> None:
    for size, in_loop in ((10, True), (1 << 17, False)):
        response, seen = post("a" * size)
        assert response.json() == size
        assert seen == [in_loop]


def test_a_fault_of_a_large_body_is_told_like_that_of_a_small_one() -> None:
    small, large = (post(text, more=1)[0] for text in ("a", "a" * (1 << 17)))
    assert small.status_code == 400
    assert small.json() == large.json()
    assert small.json()["error"]["param"] == "more"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (rb'{"a": "\ud800"}', r"\ud800"),
        (rb'{"a": "x\udC00"}', r"\udC00"),
        (rb'{"a": "\\\ud800 b"}', r"\ud800"),
        (rb'{"a": "\ud83d\ude00\ud83d."}', r"\ud83d"),
    ],
)
def test_half_a_character_is_named(text: bytes, named: str) -> None:
    with pytest.raises(ApiError, match="lone surrogate") as caught:
        parse_json(text)
    assert named in caught.value.message


def test_what_only_looks_like_half_a_character_is_none() -> None:
    assert parse_json(rb'["\\ud800", "\ud83d\ude00"]') == ["\\ud800", "😀"]
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json(rb'["\\ud800 \ud83d\ude00"')
