"""`minisgl bench serve`: what is sent and when, how streams are read, and the figures made of it.

The server is a stub with scripted streams; times that figures are computed from are made up.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from minisgl.benchmark import figures, load, report, serve
from minisgl.benchmark.arrivals import Departure, arrival_times, drive
from minisgl.benchmark.client import Client, Failure, Reply, read_reply
from minisgl.benchmark.load import Call
from minisgl.benchmark.serve_options import ServeOptions, parse_goodput
from minisgl.cli import main
from minisgl.errors import ConfigError

KEY = "sk-secret"


# -- the stub server -----------------------------------------------------------------------


def sse(*chunks: Any) -> bytes:
    """Server-sent events of these objects; `[DONE]` is not added."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def text(*parts: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "".join(parts), "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


DONE = b"data: [DONE]\n\n"


class Stub:
    """A server in a thread; each request gets what `answer` makes of its body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.models: Any = {"data": [{"id": "stub"}, {"id": "other"}]}
        self.models_status = 200
        self.answer: Any = self.as_asked
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._call(self._start())

    def as_asked(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """As many tokens as asked for, one a chunk."""
        count = body["max_tokens"]
        size = len(body.get("prompt") or body["messages"][0]["content"].split())
        chunks = [text("a", finish="length" if i == count - 1 else None) for i in range(count)]
        return 200, sse(*chunks, usage(size, count, cached=1)) + DONE

    def close(self) -> None:
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        status, content = self.answer(body)
        if content is None:  # an answer that never comes
            await asyncio.Event().wait()
        return web.Response(status=status, body=content)


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.close()


def bench(stub: Stub, **options: Any) -> dict[str, Any]:
    """The results of a small run without warm-up."""
    small = {"num_requests": 6, "input_len": "4:8", "output_len": "3", "warmup": 0}
    return serve.bench_serve(ServeOptions(url=stub.url, **{**small, **options})).results


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


# -- how a stream is read ------------------------------------------------------------------


def read(*reads: tuple[float, bytes]) -> Reply:
    return read_reply(reads, Reply(10.0, 20.0))


def test_times_are_those_of_chunks_with_text() -> None:
    reply = read(
        (11.0, sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
        (12.0, sse({"choices": [{"delta": {"content": "a"}}]})),
        (12.5, sse({"choices": []}, {"choices": [{"delta": {}}]})),
        (14.0, sse({"choices": [{"delta": {"content": "b"}}]})),
        (15.0, sse({"choices": [{"delta": {}, "finish_reason": "length"}]})),
        (16.0, sse(usage(7, 5, cached=3)) + DONE),
    )
    assert reply.failure is None
    assert reply.ttft_s == 2.0
    assert reply.text_s == [12.0, 14.0]
    assert reply.gaps_s == [2.0]
    assert reply.tpot_s == (15.0 - 12.0) / 4
    assert reply.e2e_s == 10.0
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (7, 3, 5)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"tool_calls": [{"index": 0}]},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_what_counts_as_the_first_token(delta: dict[str, Any]) -> None:
    reply = read((12.0, sse({"choices": [{"delta": delta}]})), (13.0, DONE))
    assert reply.ttft_s == 2.0


def test_a_reply_without_any_text_has_its_end_as_first_token() -> None:
    reply = read((12.0, sse(text(""))), (13.0, sse(text("", finish="stop"), usage(1, 1))))
    assert (reply.ttft_s, reply.tpot_s, reply.gaps_s) == (3.0, None, [])


def test_events_may_be_cut_anywhere_and_have_any_line_ends() -> None:
    stream = sse(text("é"), text("b", finish="stop"), usage(2, 2)) + DONE
    for ends in (b"\n", b"\r\n"):
        content = b": comment\n\nevent: x\nid: 1\n" + stream
        content = content.replace(b"\n", ends)
        whole = read((11.0, content))
        assert (whole.failure, whole.output_tokens, whole.text_s) == (None, 2, [11.0, 11.0])
        single = read(*((11.0 + i, content[i : i + 1]) for i in range(len(content))))
        assert (single.failure, single.output_tokens) == (None, 2)
        first_end = content.index(b"}" + ends * 2) + 1 + len(ends * 2)
        assert single.text_s[0] == 11.0 + first_end - 1


def test_data_needs_no_space_nor_a_last_blank_line() -> None:
    reply = read((11.0, b'data:{"choices":[{"text":"a"}]}\n\ndata:[DONE]'))
    assert (reply.failure, reply.text_s) == (None, [11.0])


def test_without_usage_chunks_are_counted() -> None:
    reply = read((11.0, sse(text("a"), text("b"), text("c", finish="stop")) + DONE))
    assert (reply.has_usage, reply.prompt_tokens, reply.output_tokens) == (False, None, 3)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (sse(text("a")), "cut off", "without a finish_reason"),
        (b"", "cut off", "without a finish_reason"),
        (b'{"choices": []}', "cut off", "without a finish_reason"),
        (sse(text("a")) + b"data: {oops\n\n", "unreadable", "no JSON"),
        (sse({"choices": [{"text": 7}]}), "unreadable", "no JSON"),
        (sse(text("a"), {"error": {"message": "worker\ndied"}}), "error in stream", "worker died"),
        (sse({"error": "flat"}), "error in stream", "flat"),
        (sse({"error": {"code": 5}}), "error in stream", '{"code":5}'),
    ],
)  # fmt: skip
def test_a_broken_stream_is_a_failure(content: bytes, kind: str, words: str) -> None:
    failure = read((11.0, content)).failure
    assert failure is not None
    assert failure.kind == kind
    assert words in failure.message


def test_a_failure_that_is_known_is_not_renamed() -> None:
    reply = Reply(10.0, 20.0, failure=Failure("timeout", "late"))
    reply = read_reply([(11.0, sse(text("a")) + b"data: {half")], reply)
    assert reply.failure == Failure("timeout", "late")


# -- figures -------------------------------------------------------------------------------


def good(sent_s: float, marks: list[float], end_s: float, tokens: int, prompt: int = 4) -> Reply:
    return Reply(
        sent_s, end_s, marks[0], marks[-1], marks, True, prompt, output_tokens=tokens
    )  # fmt: skip


def figured(
    replies: list[Reply], *, asked: int = 3, cpu_s: float = 0.0, held: bool = False, **options: Any
) -> dict[str, Any]:
    goodput = options.pop("goodput", {})
    departures = [Departure(reply.sent_s - 0.001, held, reply) for reply in replies]
    return figures.serve_figures(
        ServeOptions(**options),
        [Call(b"", 4, asked)] * len(replies),
        departures,
        goodput=goodput,
        cpu_s=cpu_s,
    )


def test_figures_of_made_up_times() -> None:
    found = figured(
        [
            good(0.0, [0.1, 0.2, 0.4], 0.5, tokens=3),
            good(1.0, [1.3, 1.4, 1.5], 2.0, tokens=3),
        ],
        cpu_s=0.5,
    )
    assert (found["requests"], found["ok"], found["failed"], found["errors"]) == (2, 2, 0, [])
    assert found["duration_s"] == 2.0
    assert found["requests_per_s"] == 1.0
    assert (found["input_tokens"], found["output_tokens"]) == (8, 6)
    assert (found["input_tok_s"], found["output_tok_s"], found["total_tok_s"]) == (4.0, 3.0, 7.0)
    assert found["tokens_per_chunk"] == 1.0
    assert found["ttft_ms"] == {"mean": 200.0, "p50": 300.0, "p90": 300.0, "p99": 300.0}
    assert found["tpot_ms"]["mean"] == pytest.approx((150 + 100) / 2)
    assert found["itl_ms"]["mean"] == pytest.approx((100 + 200 + 100 + 100) / 4)
    assert found["e2e_ms"]["mean"] == 750.0
    assert found["client"] == {"cpu_share": 0.25}
    assert found["notes"] == []
    json.dumps(found, allow_nan=False)


def test_failed_requests_are_in_no_latency_and_no_count_of_tokens() -> None:
    failed = good(0.0, [9.0], 10.0, tokens=50)
    failed.failure = Failure("HTTP 503", "busy")
    found = figured([good(0.0, [0.1, 0.2, 0.3], 1.0, tokens=3), failed])
    assert (found["ok"], found["failed"]) == (1, 1)
    assert (found["input_tokens"], found["output_tokens"]) == (4, 3)
    assert found["e2e_ms"]["p99"] == 1000.0
    assert found["ttft_ms"]["p99"] == 100.0
    assert found["duration_s"] == 10.0


def test_a_run_without_a_success_has_no_latencies() -> None:
    found = figured([Reply(0.0, 1.0, failure=Failure("timeout", "late"))])
    assert (found["ok"], found["output_tok_s"]) == (0, 0.0)
    assert not [key for key in found if key.endswith("_ms")]


def test_errors_are_counted_by_kind_with_the_first_message() -> None:
    kinds = ["HTTP 503", "timeout", "HTTP 503"]
    replies = [Reply(0, 1, failure=Failure(kind, f"m{i}")) for i, kind in enumerate(kinds)]
    assert figures.failures([*replies, Reply(0, 1)]) == [
        {"kind": "HTTP 503", "count": 2, "message": "m0"},
        {"kind": "timeout", "count": 1, "message": "m1"},
    ]


@pytest.mark.parametrize(
    ("spans", "peak"),
    [
        ([(0, 1)], 1),
        ([(0, 1), (1, 2), (2, 3)], 1),
        ([(0, 4), (1, 2), (1.5, 3), (2.5, 5)], 3),
        ([(0, 1)] * 5, 5),
    ],
)
def test_peak_concurrency(spans: list[tuple[float, float]], peak: int) -> None:
    assert figures.peak_concurrency([Reply(*span) for span in spans]) == peak


def test_goodput_counts_requests_within_all_limits_among_all() -> None:
    failed = Reply(0.0, 0.1, failure=Failure("connection", "reset"))
    replies = [
        good(0.0, [0.1, 0.2, 0.3], 0.4, tokens=3),  # all within
        good(0.0, [0.3, 0.4, 0.5], 0.6, tokens=3),  # first token late
        good(0.0, [0.1, 0.5, 0.9], 1.0, tokens=3),  # slow tokens
        good(0.0, [0.1], 2.0, tokens=1),  # no time per token, but too long
        failed,
    ]

    def share(**limits: float) -> Any:
        return figured(replies, goodput=limits)["goodput"]["share"]

    assert share(ttft=200) == 0.6
    assert share(tpot=100) == 0.6
    assert share(e2e=1000) == 0.6
    found = figured(replies, goodput={"ttft": 200.0, "tpot": 100.0, "e2e": 1000.0})["goodput"]
    assert (found["requests"], found["share"], found["requests_per_s"]) == (1, 0.2, 0.5)
    assert "goodput" not in figured(replies)


def test_another_number_of_tokens_than_asked_is_said() -> None:
    replies = [good(0, [0.1], 1, tokens=3), good(0, [0.1], 1, tokens=2)]
    [note] = figured(replies)["notes"]
    assert "1 replies have another number of tokens" in note
    assert "2, not 3" in note
    assert figured(replies, ignore_eos=False)["notes"] == []


def test_chunks_counted_for_tokens_are_said() -> None:
    reply = read((11.0, sse(text("a"), text("b", finish="stop"))))
    found = figured([reply], asked=2)
    assert found["output_tokens"] == 2
    assert found["input_tokens"] == 4  # as the prompt was made
    assert found["notes"] == ["1 replies had no usage: their chunks were counted as tokens"]


def test_a_busy_client_says_so() -> None:
    reply = good(0.0, [0.1], 1.0, tokens=3)
    assert figured([reply], cpu_s=0.79)["notes"] == []
    [note] = figured([reply], cpu_s=0.95)["notes"]
    assert "busy 95% of the time" in note


def test_open_loop_reports_lag_and_a_rate_that_was_not_kept() -> None:
    reply = good(1.0, [1.1], 2.0, tokens=3)
    found = figured([reply], request_rate=2.0, concurrency=1, held=True)
    assert found["client"]["lag_ms"]["p99"] == pytest.approx(1.0)
    [note] = found["notes"]
    assert "1 requests waited for others to end (--concurrency 1)" in note
    closed = figured([reply], concurrency=1, held=True)
    assert (closed["notes"], "lag_ms" in closed["client"]) == ([], False)


# -- against a server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("completions", "/v1/completions"), ("chat", "/v1/chat/completions")],
)
def test_a_run_sends_what_it_counts(endpoint: str, path: str, stub: Stub) -> None:
    found = bench(stub, endpoint=endpoint, concurrency=2, api_key=KEY)
    assert (found["requests"], found["ok"], found["failed"]) == (6, 6, 0)
    assert (found["model"], found["endpoint"], found["url"]) == ("stub", endpoint, stub.url)
    assert set(stub.paths) == {path}
    assert len(stub.bodies) == 6
    assert {body["model"] for body in stub.bodies} == {"stub"}
    assert {headers["Authorization"] for headers in stub.headers} == {f"Bearer {KEY}"}
    prompts = [body.get("prompt") or body["messages"][0]["content"].split() for body in stub.bodies]
    assert found["input_tokens"] == sum(map(len, prompts))
    assert (found["output_tokens"], found["cached_tokens"]) == (18, 6)
    assert 1 <= found["peak_concurrency"] <= 2
    assert KEY not in json.dumps(found)


def test_the_warm_up_is_sent_and_not_counted(stub: Stub) -> None:
    assert bench(stub, warmup=3)["requests"] == 6
    assert len(stub.bodies) == 9


def test_the_key_of_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(stub, num_requests=1)
    monkeypatch.setenv("MINISGL_API_KEY", KEY)
    bench(stub, num_requests=1)
    assert "Authorization" not in stub.headers[0]
    assert stub.headers[1]["Authorization"] == f"Bearer {KEY}"


def test_a_model_that_is_named_needs_no_list(stub: Stub) -> None:
    stub.models, stub.models_status = {}, 404
    assert bench(stub, num_requests=1, model="mine")["model"] == "mine"
    with pytest.raises(ConfigError, match="names no model: set --model"):
        bench(stub)


def test_an_address_may_end_in_v1(stub: Stub) -> None:
    stub_url, stub.url = stub.url, stub.url + "/v1/"
    found = bench(stub, num_requests=1)
    assert (found["ok"], found["url"], stub.paths) == (1, stub_url, ["/v1/completions"])


def test_a_key_that_is_refused_is_told_at_once(stub: Stub) -> None:
    stub.models_status = 401
    with pytest.raises(ConfigError, match=r"refuses the key \(HTTP 401\): set --api-key"):
        bench(stub)
    assert stub.bodies == []


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (503, b'{"error": {"message": "queue\\nfull"}}', "queue full"),
        (500, b"<h1>sorry</h1>", "<h1>sorry</h1>"),
        (422, b'{"detail": "no"}', '{"detail": "no"}'),
        (204, b"", ""),
        (307, b"elsewhere", "elsewhere"),
    ],
)
def test_any_status_but_200_is_a_failure(
    status: int, content: bytes, message: str, stub: Stub
) -> None:
    stub.answer = lambda body: (status, content)
    [error] = bench(stub)["errors"]
    assert error == {"kind": f"HTTP {status}", "count": 6, "message": message}


def test_some_failures_leave_the_others_measured(stub: Stub) -> None:
    def every_other(body: dict[str, Any]) -> tuple[int, bytes]:
        if len(stub.bodies) % 2:
            return stub.as_asked(body)
        return 200, sse({"error": {"message": "worker died"}})

    stub.answer = every_other
    found = bench(stub, concurrency=1)
    assert (found["ok"], found["failed"], found["output_tokens"]) == (3, 3, 9)
    assert found["errors"] == [{"kind": "error in stream", "count": 3, "message": "worker died"}]


def test_a_request_that_never_ends_times_out(stub: Stub) -> None:
    stub.answer = lambda body: (200, None)
    [error] = bench(stub, num_requests=2, timeout=0.2)["errors"]
    assert (error["kind"], error["count"]) == ("timeout", 2)
    assert "0.2 s (--timeout)" in error["message"]


def test_the_client_notes_times_by_its_clock(stub: Stub) -> None:
    async def run() -> Reply:
        ticks = iter(range(100, 200))
        client = Client(
            stub.url, "completions", api_key=None, timeout_s=30, clock=lambda: float(next(ticks))
        )
        async with client:
            return await client.stream(b'{"max_tokens": 2, "prompt": [1]}')

    reply = asyncio.run(run())
    assert reply.failure is None
    assert (reply.sent_s, reply.first_s) == (100.0, 101.0)
    assert reply.end_s > 101.0


# -- the command ---------------------------------------------------------------------------


def command(stub: Stub, *flags: str) -> list[str]:
    small = ["--num-requests", "4", "--input-len", "4", "--output-len", "3", "--warmup", "1"]
    return ["bench", "serve", "--url", stub.url, *small, *flags]


def test_json_is_the_last_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(stub, "--json", "--goodput", "ttft:60000", "e2e:60000.5")) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (found["benchmark"], found["ok"], found["request_rate"]) == ("serve", 4, "inf")
    assert (found["input_len"], found["output_len"]) == ("4", "3")
    assert found["goodput"]["limits_ms"] == {"ttft": 60000, "e2e": 60000.5}
    assert found["goodput"]["share"] == 1.0
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(found[name]) == {"mean", "p50", "p90", "p99"}


def test_the_table_shows_what_was_measured(
    stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stub.models = {"data": [{"id": "[red]stub"}]}
    flags = ["--goodput", "ttft:60000", "--request-rate", "1000", "--concurrency", "4"]
    assert main(command(stub, *flags)) == 0
    shown = capsys.readouterr().out
    assert f"[red]stub at {stub.url}, completions; sent at 1000 a second, at most 4" in shown
    for row in (
        "requests ok +│ +4 of 4",
        r"input tokens +│ +16 \(4 cached\)",
        "output tokens +│ +12",
        "within ttft 60000 ms +│ +[0-9.,]+ requests/s, 100.0%",
        "TTFT +│( +[0-9.,]+ │){4}",
        "E2E +│( +[0-9.,]+ │){4}",
        "sent late by +│( +-?[0-9.,]+ │){4}",
    ):
        assert re.search(row, shown), (row, shown)


def test_the_table_shows_failures_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    failed = Reply(0.0, 1.0, failure=Failure("HTTP 503", "busy [/b] now"))
    asked = serve._asked(ServeOptions(), "m")
    report.print_serve_table({**asked, **figured([failed], cpu_s=1.0)})
    shown = capsys.readouterr().out
    assert "failed: 1 x HTTP 503: busy [/b] now" in shown
    assert "note: this client was busy 100%" in shown
    assert "TTFT" not in shown


def test_a_run_of_failures_only_exits_with_2(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answer = lambda body: (503, b'{"error": {"message": "full"}}')
    assert main(command(stub, "--json", "--warmup", "0")) == 2
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["failed"] == 4
    assert said.err == "minisgl bench serve: error: all requests failed: 4 x HTTP 503: full\n"


def test_a_warm_up_that_fails_ends_the_run(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer = lambda body: (400, b'{"error": {"message": "prompt: unknown id"}}')
    assert main(command(stub)) == 2
    assert len(stub.bodies) == 1
    said = capsys.readouterr()
    assert "the warm-up's requests all failed: 1 x HTTP 400: prompt: unknown id" in said.err


def test_no_server_is_one_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    free = "http://127.0.0.1:1"  # no one listens below 1024 there but by intent
    assert main(["bench", "serve", "--url", free]) == 2
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert (said.out, free in line, "minisgl serve" in line) == ("", True, True)


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_plot(
    name: str, magic: bytes, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(stub, "--plot", str(tmp_path / name))) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_plot_of_failures_only(stub: Stub, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from minisgl.benchmark.plot import save_plot

    failed = Departure(0.0, False, Reply(0.0, 1.0, failure=Failure("timeout", "late")))
    save_plot(str(tmp_path / "a.svg"), [failed], "title $\\frac$")
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_without_matplotlib_the_run_does_not_begin(
    stub: Stub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command(stub, "--plot", str(tmp_path / "a.png"))) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert stub.bodies == []


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "tpot:0.5"]) == {"ttft": 200.0, "tpot": 0.5}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--url", "localhost:1919"], ["--url", "'localhost:1919'"]),
        (["--endpoint", "embeddings"], ["--endpoint", "'embeddings'"]),
        (["--num-requests", "0"], ["--num-requests = 0"]),
        (["--concurrency", "0"], ["--concurrency = 0"]),
        (["--warmup", "-1"], ["--warmup = -1"]),
        (["--seed", "-1"], ["--seed = -1"]),
        (["--request-rate", "0"], ["--request-rate = 0"]),
        (["--request-rate", "nan"], ["--request-rate = nan"]),
        (["--input-len", "0"], ["--input-len = '0'"]),
        (["--input-len", ""], ["--input-len = ''"]),
        (["--input-len", "9:3"], ["--input-len = '9:3'", "LOW at most HIGH"]),
        (["--output-len", "1.5"], ["--output-len = '1.5'", "32:256"]),
        (["--vocab", "5:"], ["--vocab = '5:'"]),
        (["--vocab", "1:2", "--endpoint", "chat"], ["--vocab", "chat"]),
        (["--shared-prefix-len", "-3"], ["--shared-prefix-len = -3"]),
        (["--temperature", "inf"], ["--temperature = inf"]),
        (["--timeout", "0"], ["--timeout = 0"]),
        (["--dataset", "/no/such"], ["--dataset = '/no/such'"]),
        (["--dataset", __file__, "--input-len", "3"], ["--dataset", "--input-len"]),
        (["--goodput", "ttft"], ["--goodput = 'ttft'", "ttft:200"]),
        (["--goodput", "ttft:5", "itl:3"], ["--goodput = 'itl:3'"]),
        (["--goodput", "e2e:nan"], ["--goodput = 'e2e:nan'"]),
        (["--plot", "a.gif"], ["--plot = 'a.gif'", ".svg"]),
        (["--plot", "/no/such/a.png"], ["--plot", "'/no/such'"]),
        (["extra"], ["extra"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(
    flags: list[str],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the run has begun")

    monkeypatch.setattr(serve, "bench_serve", never)
    try:
        code: Any = main(["bench", "serve", *flags])
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert line.startswith("minisgl bench serve: error: "), line
    for words in named:
        assert words in line
