"""`StepRecorder`: the host's times in their order, and a device's on the same clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.core import FinishedStep, StepOutput
from minisgl.message import StepTrace
from minisgl.scheduler.planner import Plan
from minisgl.scheduler.recorder import StepRecorder
from tests.unit.scheduling import Made, drain, expected_output, make, make_req, outputs
from tests.unit.test_scheduler_worker import Worker, submit

CPU = torch.device("cpu")
PROMPTS = {0: [5, 6, 7], 1: [9] * 10}


def traced(*, overlap: bool) -> tuple[Made, list[StepTrace]]:
    """Two requests of 8 tokens, one in two chunks, and what was recorded of their steps."""
    made = make(budget=8, overlap=overlap)
    made.scheduler.recorder = recorder = StepRecorder(CPU)
    for uid, prompt in PROMPTS.items():
        made.scheduler.add(make_req(uid, prompt, 8, ignore_eos=True))
    found = outputs(drain(made.scheduler))
    wanted = {u: expected_output(p, 8, ignore_eos=True) for u, p in PROMPTS.items()}
    assert found == wanted
    return made, recorder.take()


# -- the host --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_is_recorded_once_with_what_it_computed(overlap: bool) -> None:
    made, steps = traced(overlap=overlap)
    stats = made.scheduler.stats
    assert [step.number for step in steps] == list(range(1, stats.num_steps + 1))
    assert sum(step.num_prefill_tokens for step in steps) == stats.num_prefill_tokens
    assert sum(step.num_decode_tokens for step in steps) == stats.num_decode_tokens
    assert [step.num_reqs for step in steps] == [len(reqs) for reqs in made.fake.steps]
    assert not any(step.is_replayed for step in steps)
    for step in steps:
        assert step.plan_s <= step.launch_s <= step.launched_s <= step.read_s <= step.read_end_s
        assert (step.device_s, step.device_end_s) == (step.launch_s, step.launched_s)
    assert made.scheduler.recorder is not None
    assert made.scheduler.recorder.take() == [], "they were taken"


def test_without_overlap_a_step_is_planned_when_the_last_one_was_read() -> None:
    _, steps = traced(overlap=False)
    for step, after in zip(steps, steps[1:], strict=False):
        assert step.read_end_s <= after.plan_s


def test_with_overlap_a_step_is_launched_before_the_last_one_is_read() -> None:
    _, steps = traced(overlap=True)
    assert len(steps) > 8
    for step, after in zip(steps, steps[1:], strict=False):
        assert step.launched_s <= after.plan_s <= after.launched_s <= step.read_s
    for step, later in zip(steps, steps[2:], strict=False):
        assert step.read_end_s <= later.plan_s, "one step ahead, and no more"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_that_failed_is_not_recorded(overlap: bool) -> None:
    made = make(overlap=overlap)
    made.scheduler.recorder = recorder = StepRecorder(CPU)
    launch = made.guard.launch

    def failing(batch: Any) -> Any:
        made.guard.launch = launch  # type: ignore[method-assign]
        raise RuntimeError("the device is broken")

    made.scheduler.add(make_req(0, [5, 6, 7], 4, ignore_eos=True))
    made.scheduler.step()
    made.guard.launch = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        made.scheduler.step()
    drain(made.scheduler)
    steps = recorder.take()
    assert [step.number for step in steps] == list(range(1, made.scheduler.stats.num_steps + 1))


# -- the way to the front --------------------------------------------------------------------


def test_the_worker_tells_the_first_route_of_each_step_once() -> None:
    worker = Worker(num_routes=2, overlap=True)
    worker.made.scheduler.recorder = StepRecorder(CPU)
    worker.run(submit(0, route=1), submit(1))
    numbers = [step.number for message in worker.routes[0].sent for step in message.steps]
    assert numbers == list(range(1, worker.made.scheduler.stats.num_steps + 1))
    assert not any(message.steps for message in worker.routes[1].sent)


def test_no_step_is_told_where_none_is_traced() -> None:
    worker = Worker(overlap=True)
    worker.run(submit(0))
    assert worker.made.scheduler.recorder is None
    assert not any(message.steps for message in worker.routes[0].sent)


# -- a device with a clock of its own ----------------------------------------------------------


class FakeCuda:
    """A host whose clock is set by hand, and a device that computes what is queued, in its order.

    The device's clock counts milliseconds from another moment, and is fast by the factor `drift`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float = 1.0) -> None:
        self.now = 100.0
        self.free_at = 0.0
        self.drift = drift
        self.num_events = 0
        fake, told = self, {"enable_timing": True}

        class Event:
            def __init__(self, **options: Any) -> None:
                assert options == told
                fake.num_events += 1

            def record(self, stream: object) -> None:
                assert stream == "the current stream"
                self.at = max(fake.free_at, fake.now)

            def synchronize(self) -> None:
                fake.now = max(fake.now, self.at)

            def elapsed_time(self, end: Event) -> float:
                assert max(self.at, end.at) <= fake.now, "not done: CUDA raises"
                return (end.at - self.at) * 1000 * fake.drift

        cuda = SimpleNamespace(Event=Event, current_stream=lambda device: "the current stream")
        monkeypatch.setattr("minisgl.scheduler.recorder.torch.cuda", cuda)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("minisgl.scheduler.recorder.time", clock)
        self.num_replayed = 0
        self.recorder = StepRecorder(torch.device("cuda"), lambda: self.num_replayed)

    def launch(self, number: int, seconds: float, *, host_s: float = 0.25) -> Callable[[], None]:
        """Plan and launch a step of so many seconds; what is returned reads it."""
        self.recorder.planning()
        self.now += host_s
        self.recorder.launching()
        self.now += host_s
        self.free_at = done_s = max(self.free_at, self.now) + seconds

        class Step:
            def result(step) -> StepOutput:
                # The tokens are there a little before the step's end.
                self.now = max(self.now, done_s - 0.001)
                return FinishedStep(StepOutput([5])).result()

        plan = Plan(0, [], 1)
        pending = self.recorder.launched(number, plan, Step())
        return lambda: [pending.result(), None][1]


def test_a_device_that_never_waits_is_drawn_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    reads = [cuda.launch(1, 2.0)]
    for number in range(2, 6):
        reads.append(cuda.launch(number, 2.0))
        reads.pop(0)()
    reads.pop()()
    first, *others = cuda.recorder.take()
    # The device was idle: all that it can be told of is when the launch began.
    assert (first.device_s, first.device_end_s) == (100.25, 102.5)
    last = first
    for step in others:
        assert step.device_s == pytest.approx(last.device_end_s)
        assert step.device_end_s - step.device_s == pytest.approx(2.0)
        assert step.launched_s < last.device_end_s, "queued in time"
        assert last.read_end_s == pytest.approx(last.device_end_s - 0.001)
        last = step


def test_a_device_that_waits_for_its_host_is_drawn_with_gaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    first = cuda.launch(1, 0.5)
    second = cuda.launch(2, 0.5, host_s=1.0)  # its launch begins after the first step's end
    first()
    second()
    before, after = cuda.recorder.take()
    assert (before.device_s, before.device_end_s) == (100.25, 101.0)
    assert after.launch_s == 101.5 and before.read_end_s == 102.5
    assert (after.device_s, after.device_end_s) == (101.5, pytest.approx(103.0))


def test_a_step_after_a_pause_begins_with_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, drift=1.001)
    cuda.launch(1, 1.0)()
    cuda.now += 1000.0  # by now the clocks are a second apart
    cuda.launch(2, 1.0)()
    _, after = cuda.recorder.take()
    assert after.device_s == after.launch_s
    assert after.device_end_s - after.device_s == pytest.approx(1.25, rel=0.002)


@pytest.mark.parametrize("drift", [0.999, 1.001])
def test_clocks_that_drift_apart_put_nothing_where_it_can_not_be(
    monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    cuda = FakeCuda(monkeypatch, drift)
    reads = [cuda.launch(1, 2.0)]
    for number in range(2, 2000):  # in the end, the clocks are four seconds apart: two steps
        reads.append(cuda.launch(number, 2.0))
        reads.pop(0)()
    last_end_s = 0.0
    for step in cuda.recorder.take():
        assert last_end_s <= step.device_s <= step.device_end_s
        assert step.launch_s <= step.device_s
        assert step.device_end_s <= step.read_end_s + 0.001001
        last_end_s = step.device_end_s


def test_a_step_says_whether_it_replayed_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    replayed = []
    launching = cuda.recorder.launching
    for number, count in enumerate((0, 1, 1, 2), 1):

        def begun(count: int = count) -> None:
            launching()
            cuda.num_replayed = count  # in the launch

        monkeypatch.setattr(cuda.recorder, "launching", begun)
        cuda.launch(number, 1.0)()
        [step] = cuda.recorder.take()
        replayed.append(step.is_replayed)
    assert replayed == [False, True, False, True]


def test_a_cpu_records_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.recorder = StepRecorder(CPU)
    cuda.launch(1, 2.0)()
    assert cuda.num_events == 0
    [step] = cuda.recorder.take()
    assert (step.device_s, step.device_end_s) == (100.25, 100.5)
