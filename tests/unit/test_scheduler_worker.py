"""The scheduler's process without the process: a real scheduler, sockets that are lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.core import Batch, SamplingParams
from minisgl.message import (
    Abort,
    EngineStats,
    Flush,
    Flushed,
    Submit,
    TokenUpdate,
)
from minisgl.scheduler.worker import MAX_FAILED_STEPS, SchedulerWorker
from tests.unit.scheduling import EOS, Made, expected_output, make

PROMPT = [5, 6, 7]


class _End(Exception):
    """There is nothing left to receive, and nothing to do."""


class FakeReceiver:
    """Hands out what was put in, a list a turn, until there is no more and the worker waits."""

    def __init__(self) -> None:
        self.turns: deque[list[Any]] = deque()

    def receive(self, *, wait: bool) -> list[Any]:
        if self.turns:
            return self.turns.popleft()
        if wait:
            raise _End
        return []


class FakeSender:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def updates(self) -> list[TokenUpdate]:
        return [u for message in self.sent for u in message.updates]

    def tokens(self, uid: int) -> list[int]:
        return [u.token_id for u in self.updates() if u.uid == uid and u.token_id is not None]

    def ends(self) -> dict[int, str]:
        """The finish reason of each sequence; fails if one got two, or went on afterwards."""
        ends: dict[int, str] = {}
        for update in self.updates():
            assert update.uid not in ends, f"{update} after the end"
            if update.finish_reason is not None:
                ends[update.uid] = update.finish_reason
        return ends


class Worker:
    def __init__(self, num_routes: int = 1, **options: Any) -> None:
        self.made: Made = make(**options)
        self.receiver, self.front = FakeReceiver(), FakeSender()
        self.routes = [FakeSender() for _ in range(num_routes)]
        worker: Any = SchedulerWorker
        self._worker = worker(self.made.scheduler, self.receiver, self.front, self.routes)

    def run(self, *turns: Any) -> None:
        """Give it a message a turn (or a list of them) and run it until it would wait."""
        self.receiver.turns += [turn if isinstance(turn, list) else [turn] for turn in turns]
        with pytest.raises(_End):
            self._worker.run()

    def run_to_failure(self, *turns: Any) -> None:
        self.receiver.turns += [[turn] for turn in turns]
        self._worker.run()

    def last_stats(self, route: int = 0) -> EngineStats:
        stats: EngineStats = self.routes[route].sent[-1].stats
        return stats

    def fail_launches(self, when: Callable[[int, Batch], bool]) -> None:
        """The device refuses the launches for which `when` says so, of their index and batch."""
        launch, count = self.made.guard.launch, 0

        def failing(batch: Batch) -> Any:
            nonlocal count
            count += 1
            if when(count - 1, batch):
                raise RuntimeError("the device is broken")
            return launch(batch)

        self.made.guard.launch = failing  # type: ignore[method-assign]


def submit(uid: int, prompt: list[int] = PROMPT, max_tokens: int = 6, **more: Any) -> Submit:
    route, priority = more.pop("route", 0), more.pop("priority", 0)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)
    params = params.resolve_defaults({})
    return Submit(uid, prompt, params, 0, [], [EOS], priority=priority, route=route)


def want(prompt: list[int] = PROMPT, max_tokens: int = 6) -> list[int]:
    return expected_output(prompt, max_tokens, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_delivered_step_by_step(overlap: bool) -> None:
    worker = Worker(overlap=overlap)
    worker.run(submit(0))
    route = worker.routes[0]
    assert route.tokens(0) == want()
    assert route.ends() == {0: "length"}
    # With overlap, a step more is launched before the end is seen.
    assert len(route.sent) in ((7, 8) if overlap else (6,))
    assert worker.front.sent == []


def test_only_the_first_token_says_how_it_came() -> None:
    worker = Worker()
    worker.run(submit(0, list(range(2, 12))))
    worker.run(submit(1, list(range(2, 12)), priority=1))
    for uid in (0, 1):
        first, *others = [u for u in worker.routes[0].updates() if u.uid == uid]
        start = first.start
        assert start is not None
        assert start.received_s <= start.started_s <= start.first_token_s
        assert start.num_cached_tokens == (8 if uid else 0), "two pages of four"
        assert [update.start for update in others] == [None] * 5


def test_each_text_worker_gets_its_own_sequences() -> None:
    worker = Worker(num_routes=3)
    prompts = {uid: [uid + 2, 5, 9 - uid] for uid in range(4)}
    worker.run([submit(uid, prompt, route=uid % 2) for uid, prompt in prompts.items()])
    for uid, prompt in prompts.items():
        assert worker.routes[uid % 2].tokens(uid) == want(prompt)
        assert worker.routes[1 - uid % 2].tokens(uid) == []
    assert worker.routes[2].sent == [], "it has no part in this"


def test_the_first_route_hears_of_every_step() -> None:
    worker = Worker(num_routes=2)
    worker.run(submit(0, route=1))
    assert [message.updates for message in worker.routes[0].sent] == [[]] * 6
    assert [message.stats.num_steps for message in worker.routes[0].sent] == [1, 2, 3, 4, 5, 6]
    assert worker.routes[1].tokens(0) == want()


def test_stats_tell_the_state_after_the_step() -> None:
    worker = Worker(num_pages=32, rows=2, budget=16)
    worker.run([submit(uid, [uid + 3] * 5) for uid in range(3)])
    first = worker.routes[0].sent[0].stats
    assert (first.num_running, first.num_waiting) == (2, 1)
    assert (first.num_pages, first.num_used_pages) == (32, 4)
    assert (first.num_prefill_tokens, first.num_queried_tokens) == (10, 10)
    assert first.step_s > 0
    last = worker.last_stats()
    assert (last.num_running, last.num_waiting, last.num_used_pages) == (0, 0, 0)
    assert last.num_prefill_tokens == 15 and last.num_decode_tokens == 3 * 5
    times = [message.stats.time_s for message in worker.routes[0].sent]
    assert times == sorted(times)


def test_the_sequences_of_a_prompt_have_uids_of_their_own() -> None:
    worker = Worker()
    worker.run(submit(10, n=3))
    assert worker.routes[0].ends() == {10: "length", 11: "length", 12: "length"}
    assert worker.routes[0].tokens(12) == want()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_abort_ends_what_runs_and_what_waits(overlap: bool, reason: Any) -> None:
    worker = Worker(rows=2, overlap=overlap)
    submits = [submit(uid, [uid + 3] * 5, max_tokens=50) for uid in range(4)]
    worker.run(submits, [], Abort([0, 3], reason), [], Abort([1, 2]))
    assert worker.routes[0].ends() == {0: reason, 1: "abort", 2: "abort", 3: reason}
    stats = worker.last_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)


def test_aborting_what_is_not_there_is_no_error() -> None:
    worker = Worker()
    worker.run(Abort([7]), submit(0), Abort([0, 8]), submit(1))
    worker.run(Abort([0, 1]))
    assert worker.routes[0].ends() == {0: "abort", 1: "length"}


def test_a_flush_is_answered_with_the_pages_it_freed() -> None:
    worker = Worker()
    worker.run(Flush(1))
    worker.run(submit(0, list(range(2, 12))))
    worker.run(Flush(2))
    worker.run(Flush(3))
    # 10 tokens and 6 more, the last of which was never computed: 15 of them, three whole pages.
    assert worker.front.sent == [Flushed(1, 0), Flushed(2, 3), Flushed(3, 0)]


def test_a_step_that_fails_is_tried_again() -> None:
    worker = Worker()
    worker.fail_launches(lambda index, batch: index in (1, 2))
    worker.run(submit(0))
    assert worker.routes[0].tokens(0) == want()
    assert worker.routes[0].ends() == {0: "length"}


def test_a_request_on_which_every_step_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.fail_launches(lambda index, batch: 0 in [req.uid for req in batch.reqs])
    worker.run(submit(0), submit(1), submit(2))
    worker.run(submit(3))
    ends = worker.routes[0].ends()
    assert ends.pop(0) == "error"
    assert ends[3] == "length" and worker.routes[0].tokens(3) == want()
    assert worker.last_stats().num_used_pages == 0
    assert "the device is broken" in caplog.text


def test_a_device_that_fails_for_good_ends_the_process() -> None:
    """After some steps, so that not every request is tried on it in vain."""
    worker = Worker(rows=1)
    failed = []
    worker.fail_launches(lambda index, batch: failed.append(index) is None)
    with pytest.raises(RuntimeError, match="the device is broken"):
        worker.run_to_failure(*(submit(uid, [uid + 3] * 5) for uid in range(20)))
    assert len(failed) == MAX_FAILED_STEPS


def test_a_request_that_can_not_be_added_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker(num_routes=2, max_len=20)
    worker.run(submit(0, [5] * 20, route=1), submit(1, [], n=2, route=1), submit(3))
    assert worker.routes[1].ends() == {0: "error", 1: "error", 2: "error"}
    assert worker.routes[0].ends() == {3: "length"}, "the others go on"
    assert caplog.text.count("was not taken") == 3
