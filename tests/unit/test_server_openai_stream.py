"""Streams of the two OpenAI endpoints: what each chunk has, and that they add up."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import TypeAdapter

from minisgl.core import SamplingParams
from minisgl.server.responses import ChatCompletionChunk, Completion
from minisgl.server.submitted import merged
from tests.unit.fake_async_engine import FakeAsyncEngine, Step, answer, fake_context
from tests.unit.openai_calls import (
    CHAT,
    HELLO,
    TEXT,
    Connection,
    Json,
    app_of,
    ask,
    events,
    stream,
    until,
)


def test_a_stream_has_the_headers_of_one() -> None:
    response = ask(FakeAsyncEngine(), CHAT, {"messages": HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "n": 3, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {"prompt": ["a", "bé"], "n": 2, "logprobs": 2}),
        (TEXT, {"prompt": ["a", "bé"], "n": 2, "logprobs": 0, "echo": True}),
        (TEXT, {"prompt": [[65, 256, 66]], "echo": True}),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(path: str, body: Json) -> None:
    def script(ids: list[int], choice: int) -> list[Step]:
        return answer("né" * choice + chr(ids[-1] % 128) + "€", "length" if choice else "stop")

    whole = ask(FakeAsyncEngine(script), path, body).json()
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = stream(FakeAsyncEngine(script), path, {**body, **options})
    assert last["usage"] == whole["usage"]
    sums: dict[int, Json] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        so_far = sums.setdefault(choice["index"], {"text": "", "logprobs": {}})
        text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        so_far["text"] += text
        for name, entries in (choice["logprobs"] or {}).items():
            so_far["logprobs"][name] = so_far["logprobs"].get(name, []) + (entries or [])
        assert "finish_reason" not in so_far, "a chunk after the last one"
        if choice["finish_reason"] is not None:
            so_far["finish_reason"] = choice["finish_reason"]
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert sums[choice["index"]]["text"] == text
        assert sums[choice["index"]]["finish_reason"] == choice["finish_reason"]
        wanted = {name: entries or [] for name, entries in (choice["logprobs"] or {}).items()}
        assert sums[choice["index"]]["logprobs"] == wanted
    assert len(sums) == len(whole["choices"])


def test_the_role_comes_with_each_choices_first_token_and_never_again() -> None:
    async def run() -> list[Json]:
        script = [Step(), *answer("ab")]  # a part of the prompt is computed first
        engine = FakeAsyncEngine(lambda _ids, _choice: list(script), manual=True)
        body = {"messages": HELLO, "n": 2, "stream": True}
        client = Connection(app_of(fake_context(engine)), CHAT, body)
        await until(lambda: engine.submitted)
        engine.step()
        for _ in range(50):
            await asyncio.sleep(0)
        assert client.sent.empty(), "something was sent before the first token"
        engine.step(3)
        await client.task
        messages = [client.sent.get_nowait() for _ in range(client.sent.qsize())]
        return events(b"".join(message.get("body", b"") for message in messages).decode())

    chunks = asyncio.run(run())
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("ab"))
    apart = stream(engine, CHAT, {"messages": HELLO, "n": 2})
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in apart]
    first = {"role": "assistant", "content": "a"}
    assert deltas[:2] == [(0, first), (1, first)]
    assert deltas[2:] == [(i, d) for d in ({"content": "b"}, {}) for i in (0, 1)]
    # What came together is one chunk a choice.
    together = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in together] == [{"role": "assistant", "content": "ab"}] * 2
    assert [choice["finish_reason"] for choice in together] == ["stop", "stop"]


def test_a_stream_of_several_prompts_that_is_closed_leaves_no_task() -> None:
    async def run() -> None:
        engine = FakeAsyncEngine(manual=True)
        generations = engine.submit([[65], [66]], SamplingParams(), request_id="r")
        arrivals = merged(generations)
        engine.step()
        assert {(await anext(arrivals)).prompt, (await anext(arrivals)).prompt} == {0, 1}
        assert len(asyncio.all_tasks()) == 3
        await arrivals.aclose()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_text_that_is_held_back_makes_no_chunk_but_the_first() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("€€", "length"))  # 6 bytes
    chunks = stream(engine, TEXT, {"prompt": "x"})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "€", "€"]
    with_logprobs = stream(engine, TEXT, {"prompt": "x", "logprobs": 0})
    assert len(with_logprobs) == 6, "each token's logprobs are due"
    TypeAdapter(Completion).validate_python(with_logprobs[1], strict=True)


def test_the_last_text_comes_with_the_finish_reason() -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("ab", "stop", "c"))
    last = stream(engine, CHAT, {"messages": HELLO})[-1]["choices"][0]
    assert last["delta"] == {"content": "b"}
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "c")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_usage_is_streamed_as_asked_for(path: str, at_end: bool, always: bool) -> None:
    engine = FakeAsyncEngine(lambda _ids, _choice: answer("abc"), num_cached_tokens=2)
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    options = {"include_usage": at_end, "continuous_usage_stats": always}
    chunks = stream(engine, path, {**body, "stream_options": options})
    if path == CHAT:
        for chunk in chunks:
            TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
    if at_end:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    if always:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
    elif at_end:
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
