"""`minisgl bench serve`: how streams are read, and the figures made of them.

Times that figures are computed from are made up.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.benchmark import figures
from minisgl.benchmark.client import Failure, Reply, read_reply
from tests.unit.bench_replies import DONE, figured, good, read, sse, text, usage

# -- how a stream is read ------------------------------------------------------------------


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
