"""Steps launched before the results of earlier ones are read give the same as one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minisgl.core import Batch, PageWrites
from minisgl.engine import Engine
from tests.by_hand import (
    CHUNK,
    EVEN,
    MIN_TOKENS,
    PAGE,
    STEPS,
    grow,
    make_requests,
    run,
    tiny_engine,
)
from tests.late_executor import LateExecutor


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = tiny_engine(tmp_path_factory.mktemp("overlap"), device="cpu", threads=1)
    yield engine
    engine.close()


@pytest.mark.parametrize("most_unread", [2, STEPS])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_overlapped_steps_equal_steps_read_one_by_one(
    engine: Engine, late: bool, most_unread: int
) -> None:
    plain, expected = run(engine, 1)
    executor = LateExecutor(engine) if late else engine
    reqs, outputs = run(executor, most_unread)
    assert outputs == expected
    assert [req.token_ids for req in reqs] == [req.token_ids for req in plain]
    if isinstance(executor, LateExecutor):
        assert executor.most_unread == most_unread


def test_the_features_compared_above_are_at_work(engine: Engine) -> None:
    (greedy, seeded), outputs = run(engine, 1)
    assert (greedy.num_output, seeded.num_output) == (STEPS, STEPS - 2)
    tokens = seeded.token_ids[seeded.prompt_len :]
    assert not EVEN & set(tokens[:MIN_TOKENS])
    assert EVEN & set(tokens[MIN_TOKENS:])
    assert seeded.num_prompt_logprobs == seeded.prompt_len - 1
    # A step in which nobody samples who asked has none.
    entries = [output.logprobs or [None, None] for output in outputs]
    assert [own is None for own, _ in entries] == [True] * STEPS
    assert [other is None for _, other in entries] == [True, True] + [False] * (STEPS - 2)
    assert any(other.rank > 1 for _, other in entries[2:])


def poison(engine: Engine) -> None:
    """What a page's former owner may have left behind: 0 * NaN is NaN, wherever it is read."""
    engine._pool.data[:, :, : engine._pool.dummy_page] = torch.nan


def test_fresh_pages_are_cleared(engine: Engine) -> None:
    # The shorter request's last page is read to its end beside the longer one, and masked.
    _, expected = run(engine, 1)
    poison(engine)
    _, outputs = run(engine, 1)
    assert outputs == expected


def test_other_pages_are_not_cleared(engine: Engine) -> None:
    poison(engine)
    first, second = (make_requests()[1] for _ in range(2))
    second.row = 2
    length, shared = first.prompt_len, 2  # the second request finds two of the four pages
    engine.attach(first)
    engine.set_pages(PageWrites([1] * 4, list(range(4)), [9, 3, 5, 0], fresh=[9, 3, 5, 0]))
    first.device_len = length
    expected = engine.launch(Batch([first])).result()
    engine.attach(second)
    engine.set_pages(PageWrites([2] * 4, list(range(4)), [9, 3, 6, 7], fresh=[6, 7]))
    second.cached_len, second.device_len = shared * PAGE, length
    output = engine.launch(Batch([second])).result()
    assert output.token_ids == expected.token_ids
    [ours], [theirs] = output.logprobs, expected.logprobs
    assert ours is not None and theirs is not None
    # The same sums over fewer rows at a time, in float32.
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_a_late_executor_wants_results_in_order_and_once(engine: Engine) -> None:
    executor, [req, _] = LateExecutor(engine), make_requests()
    executor.attach(req)
    req.device_len = PAGE
    grow(executor, [req], list(range(24)))
    first, second = (executor.launch(Batch([req])) for _ in range(2))
    with pytest.raises(AssertionError, match="in the order of the launches"):
        second.result()
    first.result()
    assert second.launched is None, "a later launch stays queued"
    with pytest.raises(AssertionError, match="in the order"):
        first.result()
    second.result()
    with pytest.raises(AssertionError, match="was read before"):
        second.result()


def test_what_a_late_executor_was_given_may_change(engine: Engine) -> None:
    _, expected = run(engine, 1)
    executor, reqs = LateExecutor(engine), make_requests()
    for req in reqs:
        executor.attach(req)
        req.device_len = CHUNK
    grow(executor, reqs, list(range(24)))
    step = executor.launch(Batch(reqs))
    for req in reqs:
        req.token_ids.clear()
        req.row = req.cached_len = req.device_len = -1
    assert step.result() == expected[0]
