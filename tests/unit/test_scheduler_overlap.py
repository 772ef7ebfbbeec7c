"""The overlap loop: a step is launched before the last one's result is read."""

from __future__ import annotations

import pytest

from minisgl.core import Batch, FinishedStep, PendingStep, Req, StepOutput
from minisgl.scheduler import Update
from tests.unit.scheduling import (
    EOS,
    Made,
    drain,
    ends,
    expected_output,
    make,
    make_req,
    next_token,
    outputs,
)


def eos_prompt(after: int) -> list[int]:
    """A prompt that the fake model continues with EOS as its `after`-th token."""
    for a in range(2, 20):
        for b in range(2, 20):
            output = expected_output([a, b], 30)
            if output[-1] == EOS and len(output) == after:
                return [a, b]
    raise AssertionError("no such prompt")


def test_a_step_is_launched_before_the_last_result_is_read():
    scheduler, _, _, guard = make(overlap=True)
    scheduler.add(make_req(0, [5] * 6, 8, ignore_eos=True))
    told = [[u.token_id for u in scheduler.step()] for _ in range(3)]
    assert guard.most_unread == 2
    want = expected_output([5] * 6, 8, ignore_eos=True)
    assert told == [[], want[:1], want[1:2]]  # a step late
    assert outputs(drain(scheduler))[0] == want[2:]


def test_both_loops_compute_the_same_steps():
    """Ends by length are known before the result: no step more, none in another order."""
    steps = []
    for overlap in (False, True):
        # A row for each: a row comes back a step later with overlap.
        scheduler, fake, *_ = make(num_pages=60, rows=5, budget=9, overlap=overlap)
        for uid, length in enumerate((5, 14, 3, 9, 21)):
            scheduler.add(make_req(uid, [3 + uid] * length, 7 + uid, ignore_eos=True))
        updates = drain(scheduler)
        assert set(ends(updates).values()) == {"length"}
        assert scheduler.stats.num_discarded_tokens == 0
        steps.append(fake.steps)
    assert steps[0] == steps[1]
    assert max(map(len, steps[0])) > 2


def test_the_token_after_an_eos_is_thrown_away():
    prompt = eos_prompt(4)
    scheduler, fake, cache, _ = make(page_size=1, overlap=True)
    scheduler.add(make_req(0, prompt, 20))
    updates = drain(scheduler)
    assert outputs(updates)[0] == expected_output(prompt, 20)
    assert ends(updates) == {0: "stop"}
    assert scheduler.stats.num_discarded_tokens == 1
    assert sum(n for step in fake.steps for _, n in step) == len(prompt) + 4  # 3 and the extra
    # EOS has keys and values, as the extra step computed it; the token it sampled is nowhere.
    assert cache.num_cached_pages == len(prompt) + 4
    probe = make_req(1, [*prompt, *expected_output(prompt, 20), 9, 9], 1)
    assert cache.match(probe).num_tokens == len(prompt) + 4


def test_a_stop_string_ends_a_request_in_flight():
    scheduler, *_ = make(overlap=True)
    scheduler.add(make_req(0, [5] * 3, 30, ignore_eos=True))
    scheduler.add(make_req(1, [6] * 3, 9, ignore_eos=True))
    updates: list[Update] = []
    while len(outputs(updates).get(0, [])) < 3:
        updates += scheduler.step()
    assert scheduler.abort(0, "stop")
    assert not scheduler.abort(0, "stop"), "it has ended"
    scheduler.check_integrity()
    updates += drain(scheduler)
    assert ends(updates) == {0: "stop", 1: "length"}
    assert outputs(updates)[0] == expected_output([5] * 3, 3, ignore_eos=True)
    assert outputs(updates)[1] == expected_output([6] * 3, 9, ignore_eos=True)


def test_row_and_pages_of_an_ended_request_wait_for_the_step_in_flight():
    """One row: the next request may start only when the extra step was read."""
    scheduler, fake, cache, _ = make(rows=1, overlap=True)
    prompt = eos_prompt(2)
    scheduler.add(make_req(0, prompt, 20))
    scheduler.add(make_req(1, [7] * 5, 2, ignore_eos=True))
    updates: list[Update] = []
    while 0 not in ends(updates):
        updates += scheduler.step()
    assert scheduler.num_running == 0
    assert cache.num_available_pages < cache.num_pages, "a launched step still writes there"
    scheduler.check_integrity()
    assert outputs(drain(scheduler))[1] == expected_output([7] * 5, 2, ignore_eos=True)
    assert [uid for step in fake.steps for uid, _ in step] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_nothing_in_flight_is_retracted(cache: str):
    """When pages run out the step in flight is read first; only then somebody loses pages."""
    made = make(num_pages=9, rows=4, budget=16, max_len=36, cache=cache, overlap=True)
    prompts = {uid: [3 + uid] * 5 for uid in range(4)}
    for uid, prompt in prompts.items():
        made.scheduler.add(make_req(uid, prompt, 20, ignore_eos=True))
    updates = drain(made.scheduler)  # the guard fails where a page in use gets a new owner
    assert made.scheduler.stats.num_retractions > 0, "the pool was meant to be too small"
    assert made.guard.most_unread == 2
    for uid, prompt in prompts.items():
        assert outputs(updates)[uid] == expected_output(prompt, 20, ignore_eos=True)


def test_a_request_that_ends_in_flight_saves_another_from_retraction():
    """Both need a second page and one is left; but the step in flight has the first one's EOS."""
    prompt = eos_prompt(3)
    made = make(num_pages=3, page_size=4, rows=2, budget=8, max_len=12, overlap=True)
    made.scheduler.add(make_req(0, prompt, 20))
    made.scheduler.add(make_req(1, [9, 9], 6, ignore_eos=True))
    updates = drain(made.scheduler)
    assert made.scheduler.stats.num_retractions == 0
    assert made.scheduler.stats.num_discarded_tokens == 0
    assert outputs(updates) == {
        0: expected_output(prompt, 20),
        1: expected_output([9, 9], 6, ignore_eos=True),
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", range(0, 34, 3))
def test_abort_at_every_moment(moment: int, overlap: bool):
    """Queued, chunked, decoding, in flight, retracted or over: one end, and nobody else hurt."""
    prompts = {uid: [2] * 6 + [3 + uid] * (1 + 4 * uid) for uid in range(4)}

    def run(victim: int | None) -> tuple[Made, list[Update]]:
        made = make(num_pages=11, rows=3, budget=7, max_len=40, overlap=overlap)
        for uid, prompt in prompts.items():
            made.scheduler.add(make_req(uid, prompt, 12, ignore_eos=True))
        updates: list[Update] = []
        for _ in range(moment):
            updates += made.scheduler.step()
        if victim is not None:
            lives = victim not in ends(updates)
            assert made.scheduler.abort(victim) == lives
            assert not made.scheduler.abort(victim)
            made.scheduler.check_integrity()
        return made, updates + drain(made.scheduler)

    for victim in prompts:
        made, updates = run(victim)
        assert len(ends(updates)) == len(prompts)
        for uid, prompt in prompts.items():
            want = expected_output(prompt, 12, ignore_eos=True)
            got = outputs(updates)[uid]
            assert got == (want[: len(got)] if uid == victim else want)
        assert made.cache.num_available_pages == made.cache.num_pages


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_that_fails_is_tried_again(overlap: bool, monkeypatch: pytest.MonkeyPatch):
    made = make(num_pages=40, budget=9, overlap=overlap)
    prompts = {uid: [2] * 8 + [3 + uid] * 5 for uid in range(4)}
    for uid, prompt in prompts.items():
        made.scheduler.add(make_req(uid, prompt, 9, ignore_eos=True))
    launch, calls = made.guard.launch, 0

    def flaky(batch: Batch) -> PendingStep:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise MemoryError("no room for this step")
        return launch(batch)

    monkeypatch.setattr(made.guard, "launch", flaky)
    updates: list[Update] = []
    while made.scheduler.has_work:
        try:
            updates += made.scheduler.step()
        except MemoryError:
            made.scheduler.check_integrity()
    assert calls > 9
    for uid, prompt in prompts.items():
        assert outputs(updates)[uid] == expected_output(prompt, 9, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_result_that_fails_ends_its_requests_and_leaves_nothing_cached(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    made = make(num_pages=40, rows=3, budget=9, overlap=overlap)
    for uid in range(5):
        made.scheduler.add(make_req(uid, [2] * 8 + [3 + uid] * 5, 9, ignore_eos=True))
    updates: list[Update] = []
    for _ in range(5):
        updates += made.scheduler.step()
    launch = made.guard.launch

    class Lost(FinishedStep):
        def result(self) -> StepOutput:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(
        made.guard, "launch", lambda batch: (launch(batch), Lost(StepOutput([])))[1]
    )
    with pytest.raises(RuntimeError, match="the device is gone"):
        for _ in range(2):
            updates += made.scheduler.step()
    monkeypatch.undo()
    made.guard.forget()
    assert made.cache.num_cached_pages == 0
    made.scheduler.check_integrity()
    updates += drain(made.scheduler)
    reasons = ends(updates)
    assert set(reasons.values()) == {"error", "length"}
    for uid, reason in reasons.items():
        want = expected_output([2] * 8 + [3 + uid] * 5, 9, ignore_eos=True)
        got = outputs(updates)[uid]
        assert got == (want if reason == "length" else want[: len(got)])


def test_who_was_in_no_lost_step_begins_again(monkeypatch: pytest.MonkeyPatch):
    made = make(page_size=2, rows=3, budget=3)
    prompts = {0: [3] * 2, 1: [4] * 9, 2: [5] * 9}
    for uid, prompt in prompts.items():
        made.scheduler.add(make_req(uid, prompt, 4, ignore_eos=True))
    updates = made.scheduler.step() + made.scheduler.step()
    launch = made.guard.launch

    class Lost(FinishedStep):
        def result(self) -> StepOutput:
            raise RuntimeError("the device is gone")

    def losing(batch: Batch) -> PendingStep:
        launch(batch).result()
        return Lost(StepOutput([]))

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device is gone"):
        patch.setattr(made.guard, "launch", losing)
        made.scheduler.step()
    assert [dict(step).keys() for step in made.fake.steps] == [{0, 1}, {0, 1, 2}, {0, 1}]
    assert (made.scheduler.num_running, made.scheduler.num_waiting) == (0, 1)
    assert made.cache.num_cached_pages == 0
    updates += drain(made.scheduler)
    assert ends(updates) == {0: "error", 1: "error", 2: "length"}
    assert outputs(updates)[2] == expected_output(prompts[2], 4, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_launches_that_fail_again_and_again_end_their_requests_only(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    """One request can't be attached: it ends in an error, and those behind it get their turn."""
    made = make(rows=1, overlap=overlap)
    attach = made.guard.attach

    def picky(req: Req) -> None:
        if req.uid == 1:
            raise MemoryError("no room for this one")
        attach(req)

    monkeypatch.setattr(made.guard, "attach", picky)
    for uid in range(3):
        made.scheduler.add(make_req(uid, [3 + uid] * 5, 4, ignore_eos=True))
    updates: list[Update] = []
    failures = 0
    while made.scheduler.has_work:
        try:
            updates += made.scheduler.step()
        except MemoryError:
            failures += 1
            assert failures <= 3
        made.scheduler.check_integrity()
    assert ends(updates) == {0: "length", 1: "error", 2: "length"}
    assert outputs(updates)[2] == expected_output([5] * 5, 4, ignore_eos=True)


def test_an_abort_from_inside_a_step_waits_for_the_next(monkeypatch: pytest.MonkeyPatch):
    """As when Python finalizes a stream that nobody holds any more, which may be anywhere."""
    made = make()
    for uid in range(2):
        made.scheduler.add(make_req(uid, [3 + uid] * 5, 6, ignore_eos=True))
    launch = made.guard.launch

    def aborting(batch: Batch) -> PendingStep:
        assert made.scheduler.abort(0)
        return launch(batch)

    updates = made.scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(made.guard, "launch", aborting)
        updates += made.scheduler.step()
    assert ends(updates) == {}
    updates += drain(made.scheduler)
    assert ends(updates) == {0: "abort", 1: "length"}
    assert len(outputs(updates)[0]) == 2


def test_the_model_of_these_tests_ends_when_it_should():
    assert next_token([*eos_prompt(3), *expected_output(eos_prompt(3), 30)[:2]]) == EOS
