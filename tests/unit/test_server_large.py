"""Answers with many log-probabilities: what they are limited to, and how they are written."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequestError
from minisgl.server import large
from minisgl.server.large import JsonList, apart, check_entries, written
from tests.unit.fake_async_engine import FakeAsyncEngine


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_a_list_is_written_as_json(count: int) -> None:
    items = [{"a": [index, None]} for index in range(count)]
    whole: Any = {"list": written(iter(items))}
    assert json.loads(msgspec.json.encode(whole)) == {"list": items}


def test_a_list_grows_and_its_copy_does_so_by_itself() -> None:
    first = JsonList([1])
    second = first.copy()
    first.extend([2, 3])
    second.extend([])
    second.extend(["x"])
    assert bytes(first.raw()) == b"[1,2,3]"
    assert bytes(second.raw()) == b'[1,"x"]'


@pytest.mark.parametrize(("size", "in_loop"), [(large.LARGE, True), (large.LARGE + 1, False)])
def test_large_work_is_done_in_a_thread(size: int, in_loop: bool) -> None:
    found = asyncio.run(apart(size, threading.current_thread))
    assert (found is threading.main_thread()) == in_loop


def check(params: SamplingParams, **options: Any) -> None:
    """For a prompt of 10 tokens and one of 20, in a context of 100."""
    check_entries(
        FakeAsyncEngine(),  # type: ignore[arg-type]
        [[1] * 10, [1] * 20],
        [params] * 2,
        ("top", "n"),
        **options,
    )


@pytest.mark.parametrize(
    ("params", "options", "count"),
    [
        (SamplingParams(), {}, 0),
        (SamplingParams(logprobs=0, max_tokens=5, n=3), {}, 3 * 2 * 5),
        (SamplingParams(logprobs=20), {}, 21 * 2 * 16),
        (SamplingParams(logprobs=1), {"fill_context": True}, 2 * (90 + 80)),
        (SamplingParams(logprobs=1, max_tokens=10**9), {}, 2 * (90 + 80)),
        (SamplingParams(prompt_logprobs=4, n=2), {}, 2 * 5 * 30),
    ],
)
@pytest.mark.parametrize("repeated", [False, True])
def test_entries_are_counted_for_the_longest_answer(
    params: SamplingParams,
    options: dict[str, Any],
    count: int,
    repeated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "MAX_REPEATED" if repeated else "MAX_ENTRIES"
    monkeypatch.setattr(large, name, count)
    check(params, repeated=repeated, **options)
    monkeypatch.setattr(large, name, count - 1)
    with pytest.raises(InvalidRequestError, match=f"{count} .*lower top or n") as caught:
        check(params, repeated=repeated, **options)
    assert caught.value.param == "top"


def test_what_the_model_says_of_the_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeAsyncEngine(generation_defaults={"max_new_tokens": 50})
    monkeypatch.setattr(large, "MAX_ENTRIES", 49)
    with pytest.raises(InvalidRequestError, match="50 log-probabilities"):
        check_entries(engine, [[1]], [SamplingParams(logprobs=0)], ("n",))


def test_a_long_prompt_with_all_its_logprobs_is_fine() -> None:
    engine: Any = FakeAsyncEngine(max_prompt_len=131071)
    check_entries(engine, [[1] * 8192], [SamplingParams(prompt_logprobs=20)], ("n",))
    whole = SamplingParams(logprobs=20)  # a chat without max_tokens
    check_entries(engine, [[1]], [whole], ("n",), fill_context=True)
