"""Streams of SGLang's native API: what each event has, and how they end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.fake_async_engine import END, FakeAsyncEngine, Step, answer
from tests.unit.native_calls import events, generate, routes
from tests.unit.routes import error_of


def test_a_stream_has_all_so_far_in_each_event() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: answer("a€b")))
    got = events(server, rid="r")
    assert [one["text"] for one in got] == ["a", "a", "a", "a€", "a€b", "a€b"]
    assert got[-1]["output_ids"] == [97, *"€".encode(), 98, END]
    for count, one in enumerate(got, 1):
        assert one["output_ids"] == got[-1]["output_ids"][:count]
        assert one["meta_info"]["completion_tokens"] == count
        assert one["meta_info"]["id"] == "r"
        assert "index" not in one
    assert [one["meta_info"]["finish_reason"] for one in got[:-1]] == [None] * 5
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert "e2e_latency" not in got[0]["meta_info"]
    assert got[-1]["meta_info"]["e2e_latency"] >= 0


def test_the_last_event_is_the_whole_answer() -> None:
    options = {"return_logprob": True, "top_logprobs_num": 2, "rid": "r"}
    last, whole = events(routes(), **options)[-1], generate(routes(), **options)
    for one in (last, whole):
        del one["meta_info"]["e2e_latency"]
    assert last == whole


def test_a_stream_of_several_says_whose_each_event_is() -> None:
    server = routes(FakeAsyncEngine(script=lambda ids, choice: answer(f"{chr(ids[1])}{choice}")))
    got = events(server, text=["a", "b"], sampling_params={"n": 2})
    last = {one["index"]: one["text"] for one in got}
    assert last == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_deltas_that_came_together_make_one_event() -> None:
    async def scenario() -> str:
        server = routes(FakeAsyncEngine(manual=True, script=lambda _i, _c: answer("abc", "length")))
        body = {"text": "p", "stream": True}
        request = asyncio.ensure_future(server.call("POST", "/generate", json=body))
        while not server.engine.submitted:
            await asyncio.sleep(0)
        server.engine.step(3)
        return (await request).text

    text = asyncio.run(scenario())
    assert text.count("data: ") == 2
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["text"] == "abc"


def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error() -> None:
    steps = [Step("a", (97,)), Step("", (), "error")]
    got = events(routes(FakeAsyncEngine(script=lambda _ids, _choice: list(steps))))
    assert got[0]["text"] == "a"
    assert got[-1]["error"]["code"] == "request_failed"


def test_an_engine_that_fails_before_the_first_event_gives_an_error_status() -> None:
    server = routes(FakeAsyncEngine(script=lambda _ids, _choice: [Step("", (), "error")]))
    error_of(server.post("/generate", {"text": "a", "stream": True}), 500)
    error_of(server.post("/generate", {"text": "a"}), 500)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_aborted(stream: bool) -> None:
    async def scenario() -> FakeAsyncEngine:
        server = routes(FakeAsyncEngine(manual=True))
        body = json.dumps({"text": ["a", "b"], "rid": ["x", "y"], "stream": stream})
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await gone.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(_message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        call = asyncio.ensure_future(server.app(scope, receive, send))
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        server.engine.step()
        assert server.engine.num_live == 2
        gone.set()
        await call
        return server.engine

    engine = asyncio.run(scenario())
    assert sorted(engine.aborted) == ["x", "y"]
    assert engine.num_live == 0
