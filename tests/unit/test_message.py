"""Messages arrive as they were sent, each in the union of the types that its socket takes."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl import message as messages
from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.message import (
    Abort,
    Answer,
    Decode,
    Deltas,
    Encode,
    EncodeChat,
    EngineReady,
    EngineStats,
    Flush,
    Flushed,
    FromScheduler,
    Refusal,
    RequestStart,
    SequenceDelta,
    StartFailed,
    StepDone,
    StepTrace,
    Submit,
    TextReady,
    ToFront,
    TokenUpdate,
    ToScheduler,
    ToTextWorker,
    make_reqs,
)

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    top_p=0.9,
    top_k=11,
    min_p=0.05,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.1,
    n=3,
    seed=-(2**63),
    stop=["ab", "ü\n", "😀"],
    stop_token_ids=[5, 6],
    include_stop_str_in_output=True,
    ignore_eos=True,
    min_tokens=2,
    logit_bias={3: -100.0, 70_000: 1.25},
    logprobs=4,
    prompt_logprobs=2,
    skip_special_tokens=False,
)
ENTRIES = [
    TokenLogprobs(5, -0.25, 1, ((5, -0.25), (6, -1.5))),
    TokenLogprobs(9, -math.inf, 131, ()),
]
START = RequestStart(16, 1.5, 2.25, 3.125)
STATS = EngineStats(4.5, 0.001, 3, 2, 64, 9, 100, 200, 300, 400, 50, 6)
STEP = StepTrace(7, 3, 2, 64, True, 1.5, 1.75, 2.0, 2.0, 3.5, 2.25, 3.75)
SUBMIT = Submit(10, [1, 2, 3], PARAMS, 2**64 - 1, [1, 5, 6], [1], -4, "sälty", 2)
UPDATES = [
    TokenUpdate(1, 5, None, ENTRIES[0], ENTRIES, START),
    TokenUpdate(2, finish_reason="abort"),
]
DELTAS = [
    SequenceDelta(1, "tëxt", [5, 6], ENTRIES, "stop", "ab", ENTRIES, START),
    SequenceDelta(2, "", [5], [], "stop", 5),
    SequenceDelta(3, "\0", [], []),
]
CHAT = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "more": {"a": [1, None]}}]

TO_SCHEDULER = [SUBMIT, Abort([1, 2]), Abort([3], "stop"), Flush(3)]
FROM_SCHEDULER = [
    EngineReady(256, 4, 1024, 64, 16, "cpu", "float32", 2),
    StartFailed("CheckpointError", "no such file"),
    StepDone(UPDATES, STATS),
    StepDone([], STATS, [STEP, STEP]),
    Flushed(3, 12),
]
TO_TEXT_WORKER = [
    Encode(1, "tëxt", False),
    EncodeChat(2, CHAT, True, False, [{"type": "function"}], {"enable_thinking": False}),
    EncodeChat(3, CHAT),
    Decode(4, [1, 2], True),
    *TO_SCHEDULER[:3],
    *FROM_SCHEDULER[2:4],
]
TO_FRONT = [
    *FROM_SCHEDULER,
    Answer(1, [1, 2]),
    Answer(2, text="tëxt"),
    Refusal(3, "InvalidRequestError", "no", "prompt"),
    Deltas(DELTAS, STATS, [STEP]),
    TextReady(1),
]
SENT = [
    *((one, ToScheduler) for one in TO_SCHEDULER),
    *((one, FromScheduler) for one in FROM_SCHEDULER),
    *((one, ToTextWorker) for one in TO_TEXT_WORKER),
    *((one, ToFront) for one in TO_FRONT),
]


def through_socket(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@pytest.mark.parametrize(("sent", "kind"), SENT, ids=lambda value: type(value).__name__)
def test_a_message_arrives_as_it_was_sent(sent: Any, kind: Any) -> None:
    got = through_socket(sent, kind)
    assert type(got) is type(sent)
    assert got == sent


def test_every_message_was_tried() -> None:
    unions = [ToScheduler, FromScheduler, ToTextWorker, ToFront]
    kinds = {kind for union in unions for kind in get_args(union)}
    assert kinds == {type(message) for message, _ in SENT}
    inside = {RequestStart, TokenUpdate, EngineStats, SequenceDelta, StepTrace}
    defined = {value for value in vars(messages).values() if isinstance(value, type)}
    assert kinds | inside == {kind for kind in defined if issubclass(kind, msgspec.Struct)}


def test_what_was_immutable_still_is() -> None:
    params = through_socket(SUBMIT, ToScheduler).params
    assert params.stop == ("ab", "ü\n", "😀") and params.stop_token_ids == (5, 6)
    assert params.logit_bias == {3: -100.0, 70_000: 1.25}
    got = through_socket(StepDone(UPDATES, STATS), FromScheduler)
    assert got.updates[0].logprobs.top == ((5, -0.25), (6, -1.5))


@given(st.floats(allow_nan=False, width=64), st.integers(0, 2**31), st.integers(1, 2**20))
def test_numbers_arrive_exactly(logprob: float, token: int, rank: int) -> None:
    entry = TokenLogprobs(token, logprob, rank, ((token, logprob),))
    update = TokenUpdate(token, token, logprobs=entry)
    assert through_socket(StepDone([update], STATS), FromScheduler).updates == [update]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Flush(1), FromScheduler),
        (Flushed(1, 2), ToScheduler),
        (Encode(1, "a", True), ToScheduler),
        (Deltas([], STATS), ToTextWorker),
        (["Flush", "one"], ToScheduler),
        (["Abort", [1], "error"], ToScheduler),
    ],
)
def test_a_message_of_another_socket_is_refused(message: Any, kind: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        through_socket(message, kind)


def test_parameters_out_of_range_are_refused_on_arrival() -> None:
    data = msgspec.msgpack.encode(SUBMIT)
    assert data.count(b"\xa1n\x03") == 1
    with pytest.raises(msgspec.ValidationError, match="n = 0"):
        msgspec.msgpack.decode(data.replace(b"\xa1n\x03", b"\xa1n\x00"), type=ToScheduler)


def test_the_requests_of_a_prompt() -> None:
    reqs = make_reqs(SUBMIT)
    assert [req.uid for req in reqs] == [10, 11, 12]
    assert [req.choice for req in reqs] == [0, 1, 2]
    for req in reqs:
        assert req.token_ids == [1, 2, 3] and req.prompt_len == 3
        assert req.max_len == 3 + 7
        assert (req.seed, req.priority, req.cache_salt) == (2**64 - 1, -4, "sälty")
        assert (req.stop_ids, req.eos_ids) == ({1, 5, 6}, {1})
    reqs[0].token_ids.append(4)
    assert reqs[1].token_ids == SUBMIT.token_ids == [1, 2, 3]
    assert [req.params.prompt_logprobs for req in reqs] == [2, None, None]


def test_usage_of_the_cache_is_a_share() -> None:
    assert STATS.kv_cache_usage == 9 / 64
