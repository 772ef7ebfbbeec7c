"""`minisgl bench serve`: what is sent, and when."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark import load
from minisgl.benchmark.arrivals import Departure, arrival_times, drive
from minisgl.benchmark.client import Reply
from minisgl.benchmark.serve_options import ServeOptions
from minisgl.errors import ConfigError

# -- what is sent --------------------------------------------------------------------------


def sent(options: ServeOptions) -> list[dict[str, Any]]:
    return [json.loads(call.body) for call in load.measured_calls(options, "m")]


def test_prompts_are_random_ids_of_the_range_and_lengths() -> None:
    options = ServeOptions(num_requests=300, input_len="3:5", output_len="7:8", vocab="10:12")
    bodies = sent(options)
    assert len(bodies) == 300
    assert {len(body["prompt"]) for body in bodies} == {3, 4, 5}
    assert {body["max_tokens"] for body in bodies} == {7, 8}
    assert {number for body in bodies for number in body["prompt"]} == {10, 11, 12}
    calls = load.measured_calls(options, "m")
    assert [call.prompt_len for call in calls] == [len(body["prompt"]) for body in bodies]
    assert [call.max_tokens for call in calls] == [body["max_tokens"] for body in bodies]


def test_a_body_asks_for_a_greedy_stream_with_usage_past_eos() -> None:
    [body] = sent(ServeOptions(num_requests=1))
    assert {key: body[key] for key in body if key != "prompt"} == {
        "model": "m",
        "max_tokens": 128,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_without_ignore_eos_the_parameter_is_not_sent() -> None:
    [body] = sent(ServeOptions(num_requests=1, ignore_eos=False, temperature=0.5))
    assert "ignore_eos" not in body
    assert body["temperature"] == 0.5


def test_the_seed_decides_everything() -> None:
    options = ServeOptions(num_requests=5, input_len="1:50", output_len="1:50")
    assert sent(options) == sent(options)
    other = ServeOptions(num_requests=5, input_len="1:50", output_len="1:50", seed=1)
    assert sent(options) != sent(other)


def test_the_shared_prefix_comes_first_in_all_prompts() -> None:
    bodies = sent(ServeOptions(num_requests=4, input_len="2", shared_prefix_len=30))
    assert {len(body["prompt"]) for body in bodies} == {32}
    assert len({tuple(body["prompt"][:30]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][30:]) for body in bodies}) == 4


def test_warm_up_repeats_nothing_that_is_measured() -> None:
    options = ServeOptions(num_requests=4, warmup=4, input_len="32", shared_prefix_len=30)
    measured = {tuple(body["prompt"][:8]) for body in sent(options)}
    for call in load.warm_up_calls(options, "m"):
        assert tuple(json.loads(call.body)["prompt"][:8]) not in measured


def test_chat_sends_words() -> None:
    [body] = sent(ServeOptions(endpoint="chat", num_requests=1, input_len="9"))
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 9
    assert "prompt" not in body


def write(folder: Path, *lines: Any) -> str:
    file = folder / "data.jsonl"
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(rows), encoding="utf-8")
    return str(file)


def test_a_dataset_is_sent_in_order_and_may_end_at_eos(tmp_path: Path) -> None:
    lines = [{"prompt": "one", "max_tokens": 5, "id": 7}, "", {"prompt": [1, 2]}]
    bodies = sent(ServeOptions(dataset=write(tmp_path, *lines), output_len="9"))
    assert [(body["prompt"], body["max_tokens"]) for body in bodies] == [("one", 5), ([1, 2], 9)]
    assert all("ignore_eos" not in body and "id" not in body for body in bodies)


def test_a_dataset_of_conversations(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = write(tmp_path, {"messages": messages}, {"prompt": "p"}, {"prompt": "unused"})
    bodies = sent(ServeOptions(dataset=file, endpoint="chat", num_requests=2))
    assert [body["messages"] for body in bodies] == [
        messages,
        [{"role": "user", "content": "p"}],
    ]


@pytest.mark.parametrize(
    ("line", "endpoint", "words"),
    [
        ("{", "chat", ":2: this line is no JSON"),
        ("[1]", "chat", ":2: this line is no JSON object"),
        ({"text": "x"}, "chat", "one of `prompt` and `messages`"),
        ({"prompt": ""}, "completions", "one of `prompt` and `messages`"),
        ({"prompt": "x", "messages": [{}]}, "chat", "one of `prompt` and `messages`"),
        ({"messages": [{}]}, "completions", "need --endpoint chat"),
        ({"messages": ["hi"]}, "chat", "`messages` must be a list of objects"),
        ({"prompt": [1]}, "chat", "needs --endpoint completions"),
        ({"prompt": [1, True]}, "completions", "text or a list of token ids"),
        ({"prompt": "x", "max_tokens": 0}, "chat", "max_tokens = 0"),
        ({"prompt": "x", "max_tokens": "5"}, "chat", "max_tokens = '5'"),
    ],
)
def test_a_wrong_line_of_a_dataset_is_named(
    line: Any, endpoint: str, words: str, tmp_path: Path
) -> None:
    file = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        load.measured_calls(ServeOptions(dataset=file, endpoint=endpoint), "m")
    assert str(raised.value).startswith(f"{file}:2: ")


def test_a_dataset_is_not_repeated(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "a"})
    with pytest.raises(ConfigError, match="has 1 requests, not the 2 of --num-requests"):
        load.measured_calls(ServeOptions(dataset=file, num_requests=2), "m")
    with pytest.raises(ConfigError, match="has 0 requests"):
        load.measured_calls(ServeOptions(dataset=write(tmp_path, "")), "m")


# -- when it is sent -----------------------------------------------------------------------


def test_arrivals_keep_the_rate_and_the_seed() -> None:
    times = arrival_times(10_001, 4.0, 0)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2500, rel=0.05)  # 10,000 gaps: 1 % is a standard deviation
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    # Of exponential gaps, 1 - 1/e are below the mean; of equal ones all or none were.
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(1 - 1 / math.e, abs=0.02)
    assert times == arrival_times(10_001, 4.0, 0)
    assert times != arrival_times(10_001, 4.0, 1)


def test_at_an_infinite_rate_all_are_due_at_once() -> None:
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def test_open_loop_sends_each_when_it_is_due() -> None:
    clock = FakeTime()

    async def send(body: bytes) -> Reply:
        return Reply(clock(), clock())

    departures = asyncio.run(
        drive([b"1", b"2", b"3"], send, due_s=[0, 2, 5], clock=clock, sleep=clock.sleep)
    )
    assert [departure.ready_s for departure in departures] == [100, 102, 105]
    assert not any(departure.held for departure in departures)


def test_a_request_that_waits_for_a_slot_is_due_when_it_has_it() -> None:
    clock = FakeTime()

    async def send(body: bytes) -> Reply:
        await clock.sleep(3)
        return Reply(clock(), clock())

    departures = asyncio.run(
        drive([b"1", b"2"], send, due_s=[0, 1], concurrency=1, clock=clock, sleep=clock.sleep)
    )
    # The second was due at 101. The fake clock adds both sleeps up: 1 until then, 3 of the first.
    assert [(d.ready_s, d.held) for d in departures] == [(100, False), (104, True)]


def test_the_lag_is_what_the_client_was_late() -> None:
    assert Departure(5.0, False, Reply(5.25, 9.0)).lag_s == 0.25


def test_closed_loop_never_has_more_in_flight_and_keeps_the_order() -> None:
    async def run() -> tuple[list[Departure], list[int], list[bytes]]:
        running: list[bytes] = []
        counts: list[int] = []
        order: list[bytes] = []

        async def send(body: bytes) -> Reply:
            running.append(body)
            order.append(body)
            counts.append(len(running))
            for _ in range(1 + len(order) % 3):
                await asyncio.sleep(0)
            running.remove(body)
            return Reply(0, 0, output_tokens=int(body))

        bodies = [b"%d" % i for i in range(10)]
        return await drive(bodies, send, due_s=[0.0] * 10, concurrency=3), counts, order

    departures, counts, order = asyncio.run(run())
    assert max(counts) == 3
    assert order == [b"%d" % i for i in range(10)]
    assert [departure.reply.output_tokens for departure in departures] == list(range(10))
    assert [departure.held for departure in departures] == [False] * 3 + [True] * 7
