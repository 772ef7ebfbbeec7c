"""The scheduler's policy on a fake executor: batches, budget, retraction, ends, conservation."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minisgl.core import Req, SamplingParams
from minisgl.errors import InvalidRequestError
from minisgl.kvcache import NaiveCache
from minisgl.scheduler import Limits, Scheduler, Update
from tests.unit.fake_executor import FakeExecutor

EOS = 1


def next_token(tokens: list[int]) -> int:
    """A deterministic 'model': the same tokens always continue the same way; EOS now and then."""
    return (sum(tokens) * 31 + len(tokens) * 7) % 23


def make_req(uid: int, prompt: list[int], max_tokens: int, **params) -> Req:
    complete = SamplingParams(temperature=0.0, **params).resolve_defaults({})
    return Req(
        uid=uid,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        params=complete,
        max_len=len(prompt) + max_tokens,
        stop_ids=frozenset({EOS}),
        eos_ids=frozenset({EOS}),
    )


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def make(
    num_pages: int = 64, page_size: int = 4, rows: int = 4, budget: int = 16, max_len: int = 128
) -> tuple[Scheduler, FakeExecutor, NaiveCache]:
    executor, cache = FakeExecutor(page_size, next_token), NaiveCache(num_pages, page_size)
    return Scheduler(executor, cache, Limits(rows, budget, max_len)), executor, cache


def drain(scheduler: Scheduler, limit: int = 2000) -> list[Update]:
    updates: list[Update] = []
    for _ in range(limit):
        if not scheduler.has_work:
            return updates
        updates += scheduler.step()
    raise AssertionError(f"still working after {limit} steps: livelock")


def outputs(updates: list[Update]) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for update in updates:
        result.setdefault(update.uid, [])
        if update.token_id is not None:
            result[update.uid].append(update.token_id)
    return result


def test_prompts_fill_the_budget_and_the_next_is_cut():
    scheduler, executor, _ = make(budget=16)
    for uid, length in enumerate((6, 6, 9)):
        scheduler.add(make_req(uid, [5] * length, 3))
    scheduler.step()
    assert executor.steps[0] == [(0, 6), (1, 6), (2, 4)]
    scheduler.step()  # two decode, and the third's rest fits beside them
    assert executor.steps[1] == [(0, 1), (1, 1), (2, 5)]


def test_decoding_goes_on_beside_a_long_prompt():
    scheduler, executor, _ = make(budget=8)
    scheduler.add(make_req(0, [5, 6], 30))
    scheduler.step()
    scheduler.add(make_req(1, [7] * 40, 2))
    scheduler.step()
    assert executor.steps[-1] == [(0, 1), (1, 7)]


def test_output_and_finish_reasons():
    scheduler, _, _ = make()
    prompts = {uid: [uid + 2, 5, 9 - uid] for uid in range(6)}
    for uid, prompt in prompts.items():
        scheduler.add(make_req(uid, prompt, 12))
    updates = drain(scheduler)
    for uid, prompt in prompts.items():
        want = expected_output(prompt, 12)
        assert outputs(updates)[uid] == want
        [end] = [u.finish_reason for u in updates if u.uid == uid and u.finish_reason]
        assert end == ("stop" if want[-1] == EOS else "length")


def test_retracted_requests_end_as_if_undisturbed():
    scheduler, _, cache = make(num_pages=9, rows=4, budget=16, max_len=36)
    prompts = {uid: [3 + uid] * 5 for uid in range(4)}
    for uid, prompt in prompts.items():
        scheduler.add(make_req(uid, prompt, 20))
    updates = drain(scheduler)
    assert scheduler.num_retractions > 0, "the pool was meant to be too small"
    for uid, prompt in prompts.items():
        assert outputs(updates)[uid] == expected_output(prompt, 20)
    assert cache.num_free_pages == 9


def test_a_retracted_request_comes_before_those_that_never_ran():
    scheduler, executor, _ = make(num_pages=4, rows=2, budget=16, max_len=16)
    for uid in range(3):
        scheduler.add(make_req(uid, [3 + uid] * 7, 9, ignore_eos=True))
    drain(scheduler)
    assert scheduler.num_retractions > 0
    first = [next(i for i, s in enumerate(executor.steps) if uid in dict(s)) for uid in range(3)]
    last = [max(i for i, s in enumerate(executor.steps) if uid in dict(s)) for uid in range(3)]
    assert last[1] < last[2] and first[1] < first[2], "2 was admitted before 1 came back"


def test_no_stop_id_ends_a_request_before_min_tokens():
    prompt = next([a, b] for a in range(2, 20) for b in range(2, 20) if next_token([a, b]) == EOS)
    scheduler, _, _ = make()
    scheduler.add(make_req(0, prompt, 5))
    scheduler.add(make_req(1, prompt, 5, min_tokens=2))
    got = outputs(drain(scheduler))
    assert got[0] == [EOS]
    assert len(got[1]) > 1


def test_a_pool_of_one_request_serves_many():
    """No livelock at the smallest pool that can hold a request at all."""
    scheduler, _, _ = make(num_pages=3, page_size=4, rows=4, max_len=12)
    for uid in range(5):
        scheduler.add(make_req(uid, [4 + uid] * 8, 50))
    updates = drain(scheduler)
    assert [u.uid for u in updates if u.finish_reason] == [0, 1, 2, 3, 4]


def test_what_can_never_fit_is_refused_at_once_with_the_numbers():
    scheduler, _, _ = make(num_pages=3, page_size=4, max_len=100)
    with pytest.raises(InvalidRequestError, match="12 tokens.*longest sequence of 12"):
        scheduler.add(make_req(0, [4] * 12, 1))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(make_req(1, [], 1))
    assert not scheduler.has_work
    scheduler.add(make_req(2, [4] * 11, 1))
    assert [u.finish_reason for u in drain(scheduler)] == ["length"]


def test_abort_queued_chunked_and_running():
    scheduler, _, cache = make(rows=2, budget=8)
    scheduler.add(make_req(0, [4] * 3, 60))
    scheduler.add(make_req(1, [5] * 30, 60))
    scheduler.add(make_req(2, [6] * 3, 60))
    scheduler.step()  # 0 runs, 1 is chunked, 2 waits for a row
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    for uid in (2, 1, 0):
        assert scheduler.abort(uid)
        assert not scheduler.abort(uid), "one end only"
    ends = scheduler.step()
    assert [(u.uid, u.finish_reason) for u in ends] == [(2, "abort"), (1, "abort"), (0, "abort")]
    assert not scheduler.has_work
    assert cache.num_free_pages == cache.num_pages


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match="token budget 3"):
        make(rows=4, budget=3)


@settings(max_examples=40, stateful_step_count=40)
class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals and aborts on a small pool; conservation after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.executor, self.cache = make(
            num_pages=7, page_size=3, rows=3, budget=5, max_len=21
        )
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.got: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.aborted: set[int] = set()

    @rule(length=st.integers(1, 12), token=st.integers(2, 9), more=st.integers(1, 15))
    def add(self, length: int, token: int, more: int) -> None:
        uid = len(self.prompts)
        self.prompts[uid] = ([token] * length, more)
        self.got[uid] = []
        self.scheduler.add(make_req(uid, [token] * length, more))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.prompts)))
        lives = uid not in self.ends and uid not in self.aborted
        assert self.scheduler.abort(uid) == lives
        self.aborted.add(uid)

    @rule()
    def step(self) -> None:
        for update in self.scheduler.step():
            assert update.uid not in self.ends, "something after the end"
            if update.token_id is not None:
                self.got[update.uid].append(update.token_id)
            if update.finish_reason is not None:
                self.ends[update.uid] = update.finish_reason

    @invariant()
    def conserved(self) -> None:
        self.cache.check_integrity(self.scheduler._running)
        rows = [req.row for req in self.scheduler._running] + self.scheduler._free_rows
        assert sorted(rows) == [0, 1, 2]

    def teardown(self) -> None:
        for update in drain(self.scheduler):
            assert update.uid not in self.ends
            if update.token_id is not None:
                self.got[update.uid].append(update.token_id)
            if update.finish_reason is not None:
                self.ends[update.uid] = update.finish_reason
        assert self.cache.num_free_pages == self.cache.num_pages
        for uid, (prompt, more) in self.prompts.items():
            want = expected_output(prompt, min(more, 21 - len(prompt)))
            if self.ends[uid] == "abort":
                assert self.got[uid] == want[: len(self.got[uid])]
            else:
                assert self.got[uid] == want
        super().teardown()


TestSchedulerMachine = SchedulerMachine.TestCase
