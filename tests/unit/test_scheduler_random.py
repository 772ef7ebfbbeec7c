"""Random admissions, aborts, flushes and steps on a small pool: nothing is lost, twice or late."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.scheduling import EOS, drain, expected_output, make, make_req

NUM_PAGES, MAX_LEN = 7, 21


class Asked(NamedTuple):
    prompt: list[int]
    max_tokens: int
    params: dict[str, object]


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts are runs of two tokens, so that many begin alike; EOS comes now and then.

    The executor fails a step that reads a page without the right keys and values, and the guard
    around it a row or page that gets a new owner while a step in flight uses it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, Asked] = {}
        self.got: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.aborted: set[int] = set()

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        budget=st.sampled_from([3, 5, 16]),
        cache=st.sampled_from(["radix", "radix", "naive"]),
        policy=st.sampled_from(["fcfs", "lpm"]),
        overlap=st.booleans(),
    )
    def begin(self, page_size: int, budget: int, cache: str, policy: str, overlap: bool) -> None:
        num_pages = NUM_PAGES * 3 // page_size
        self.scheduler, self.fake, self.cache, self.guard = make(
            num_pages, page_size, 3, budget, MAX_LEN, cache=cache, policy=policy, overlap=overlap
        )
        self.max_len = min(MAX_LEN, num_pages * page_size)
        self.most_ahead = 2 if overlap else 1

    @rule(
        first=st.integers(1, 8),
        then=st.integers(0, 6),
        token=st.integers(2, 4),
        more=st.integers(1, 15),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        scored=st.sampled_from([None, None, None, 0]),
        ignore_eos=st.booleans(),
    )
    def add(self, first, then, token, more, priority, salt, scored, ignore_eos) -> None:
        uid, prompt = len(self.asked), [2] * first + [token] * then
        if len(prompt) >= self.max_len:
            return
        params = {"prompt_logprobs": scored, "ignore_eos": ignore_eos}
        self.asked[uid] = Asked(prompt, min(more, self.max_len - len(prompt)), params)
        self.got[uid], self.scored[uid] = [], []
        self.scheduler.add(
            make_req(uid, prompt, more, priority=priority, cache_salt=salt, **params)
        )

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.asked)))
        lives = uid not in self.ends and uid not in self.aborted
        # A flush reads steps in flight, which may have ended it without telling yet.
        assert self.scheduler.abort(uid) <= lives
        self.aborted.add(uid)

    @rule()
    def flush(self) -> None:
        self.scheduler.flush_cache()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.scheduler.step())

    def take(self, updates) -> None:
        for update in updates:
            uid = update.uid
            assert uid not in self.ends, "something after the end"
            if update.token_id is not None:
                self.got[uid].append(update.token_id)
            self.scored[uid] += [entry.rank for entry in update.prompt_logprobs or ()]
            if update.finish_reason is not None:
                self.ends[uid] = update.finish_reason

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.guard.most_unread <= self.most_ahead

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.take(drain(self.scheduler))
        self.cache.check_counts([])
        assert self.cache.num_available_pages == self.cache.num_pages
        self.scheduler.flush_cache()
        assert self.cache.allocator.num_free == self.cache.num_pages
        for uid, (prompt, more, params) in self.asked.items():
            want = expected_output(prompt, more, ignore_eos=params["ignore_eos"])
            if self.ends[uid] == "abort":
                assert self.got[uid] == want[: len(self.got[uid])]
                continue
            assert self.got[uid] == want
            stopped = want[-1] == EOS and not params["ignore_eos"]
            assert self.ends[uid] == ("stop" if stopped else "length")
            if params["prompt_logprobs"] is not None:  # each of the prompt's tokens once, in order
                assert self.scored[uid] == list(range(1, len(prompt)))
        super().teardown()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
