"""What the two OpenAI endpoints refuse, and how requests end that fail or lose their client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from minisgl.errors import BusyError, ChatTemplateError, RequestFailedError
from minisgl.server import openai
from tests.unit.fake_async_engine import FakeAsyncEngine, Step, answer, fake_context
from tests.unit.openai_calls import (
    CHAT,
    HELLO,
    TEXT,
    Connection,
    Json,
    app_of,
    ask,
    error_of,
    stream,
    until,
)

# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["a", "b"]})]
)
def test_a_failure_behind_the_submission_leaves_nothing_running(
    path: str, body: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RequestFailedError("here")

    monkeypatch.setattr(openai, "OpenAICall", fail)
    engine = FakeAsyncEngine(manual=True)
    assert ask(engine, path, {**body, "n": 2}).status_code == 500
    assert len(engine.submitted) > 0
    assert engine.num_live == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        (CHAT, {"model": "other"}, 404, "model"),
        (TEXT, {"model": "other"}, 404, "model"),
        (CHAT, {"n": 5}, 400, "n"),
        (TEXT, {"n": 5}, 400, "n"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs"),
        (TEXT, {"prompt": [1] * 100}, 400, "prompt"),
        (TEXT, {"prompt": [[1], [999]]}, 400, "prompt"),
        (TEXT, {"prompt": [[1]] * 30, "n": 4}, 400, "prompt"),
        (TEXT, {"min_tokens": 3, "max_tokens": 2}, 400, "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    path: str, change: Json, status: int, param: str, streamed: bool
) -> None:
    engine = FakeAsyncEngine(max_queued=100)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    body = {**body, **change, "stream": streamed}
    response = ask(engine, path, body, max_n=4)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
    assert engine.submitted == []


def test_a_bad_prompt_among_several_is_named() -> None:
    response = ask(FakeAsyncEngine(), TEXT, {"prompt": [[1], [999]]})
    assert "prompt 1: token id 999" in error_of(response)["message"]


def test_prompt_logprobs_are_refused_in_a_stream() -> None:
    body = {"prompt": "Hi", "prompt_logprobs": 1, "stream": True}
    response = ask(FakeAsyncEngine(), TEXT, body)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_is_a_503_that_says_when_to_come_back(streamed: bool) -> None:
    engine = FakeAsyncEngine(submit_error=BusyError("the queue is full"))
    response = ask(engine, CHAT, {"messages": HELLO, "stream": streamed})
    assert response.status_code == 503
    assert "retry-after" in response.headers


def test_a_server_that_is_loading_serves_nothing() -> None:
    async def run() -> httpx.Response:
        context = fake_context(FakeAsyncEngine())
        context.state.loading = True
        transport = httpx.ASGITransport(app_of(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(CHAT, json={"messages": HELLO, "model": "any"})

    response = asyncio.run(run())
    assert response.status_code == 503 and "loading" in error_of(response)["message"]


def test_a_templates_refusal_is_a_400() -> None:
    engine = FakeAsyncEngine(template_error=ChatTemplateError("roles must alternate", "messages"))
    response = ask(engine, CHAT, {"messages": HELLO})
    assert response.status_code == 400
    assert error_of(response)["message"] == "roles must alternate"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_failure_before_the_first_token_is_a_500(streamed: bool, prompt: Any) -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("", (), "error")])
    response = ask(engine, TEXT, {"prompt": prompt, "stream": streamed})
    assert response.status_code == 500
    assert error_of(response)["code"] == "request_failed"


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: [Step("a", (97,)), Step("", (), "error")])
    chunks = stream(engine, CHAT, {"messages": HELLO})
    assert chunks[0]["choices"][0]["delta"]["content"] == "a"
    assert chunks[1]["error"]["code"] == "request_failed"
    assert len(chunks) == 2


def test_a_failure_of_one_prompt_ends_the_others() -> None:
    def script(ids: list[int], _choice: int) -> list[Step]:
        if ids[-1] == ord("b"):
            return [Step("x", (120,)), Step("", (), "error")]
        return answer("long" * 20, "length")

    engine = FakeAsyncEngine(script)
    *_, last = stream(engine, TEXT, {"prompt": ["a", "b"], "max_tokens": 80})
    assert last["error"]["code"] == "request_failed"
    assert engine.aborted == [engine.submitted[0].request_id]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_engines_death_ends_live_requests(streamed: bool) -> None:
    async def run() -> list[Json]:
        engine = FakeAsyncEngine(manual=True)
        body = {"messages": HELLO, "stream": streamed}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        engine.die()
        await client.task
        return [client.sent.get_nowait() for _ in range(client.sent.qsize())]

    start, *bodies = asyncio.run(run())
    assert start["status"] == 503
    assert json.loads(bodies[0]["body"])["error"]["code"] == "engine_dead"


# -- clients that go away ----------------------------------------------------------------------


def gone(
    body: Json, before: Callable[[Connection, FakeAsyncEngine], Awaitable[None]]
) -> tuple[FakeAsyncEngine, Connection]:
    """What is left after a client has done `before` and has left."""

    async def run() -> tuple[FakeAsyncEngine, Connection]:
        engine = FakeAsyncEngine(manual=True)
        path = CHAT if "messages" in body else TEXT
        client = Connection(app_of(fake_context(engine)), path, body)
        await before(client, engine)
        client.leave()
        await asyncio.wait_for(client.task, 10)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"
        return engine, client

    return asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_client_that_leaves_aborts_its_sequences(streamed: bool, several: bool) -> None:
    async def before(client: Connection, engine: FakeAsyncEngine) -> None:
        await until(lambda: len(engine.submitted) == (2 if several else 1))

    body = {"prompt": ["a", "b"] if several else "a", "n": 2, "stream": streamed}
    engine, client = gone(body, before)
    assert engine.aborted == [generation.request_id for generation in engine.submitted]
    assert engine.num_live == 0
    assert client.sent.empty()


def test_a_client_that_leaves_a_running_stream_aborts_it() -> None:
    async def before(client: Connection, engine: FakeAsyncEngine) -> None:
        await until(lambda: engine.submitted)
        engine.step()
        assert (await client.sent.get())["type"] == "http.response.start"
        assert b"assistant" in (await client.sent.get())["body"]

    engine, client = gone({"messages": HELLO, "stream": True}, before)
    assert len(engine.aborted) == 1
    assert client.sent.empty(), "something was sent to a client that had gone"


def test_a_client_that_leaves_while_its_prompt_is_encoded_is_never_submitted() -> None:
    class Slow(FakeAsyncEngine):
        encoding = False

        async def encode_chat(self, messages: list[Json], **options: Any) -> list[int]:
            self.encoding = True
            await asyncio.Event().wait()
            raise AssertionError

    async def run() -> FakeAsyncEngine:
        engine = Slow()
        client = Connection(app_of(fake_context(engine)), CHAT, {"messages": HELLO})
        await until(lambda: engine.encoding)
        client.leave()
        await asyncio.wait_for(client.task, 10)
        return engine

    assert asyncio.run(run()).submitted == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_handler_that_is_cancelled_aborts_its_sequences(streamed: bool) -> None:
    async def run() -> FakeAsyncEngine:
        engine = FakeAsyncEngine(manual=True)
        body = {"messages": HELLO, "stream": streamed}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        return engine

    assert len(asyncio.run(run()).aborted) == 1


def test_a_finished_request_aborts_nothing() -> None:
    engine = FakeAsyncEngine()
    ask(engine, CHAT, {"messages": HELLO})
    stream(engine, CHAT, {"messages": HELLO})
    assert engine.aborted == []
