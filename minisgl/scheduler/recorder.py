"""When each step was planned, launched, computed and read: what `--trace-file` draws.

    host     plan 2 | launch 2 | read 1 ...... | plan 3 | launch 3 | read 2 ......
    device   [ step 1 ....................... ][ step 2 ....................... ][ step 3

The host's times are read from its clock. A CUDA device has a clock of its own, of which only
intervals can be had: between events that it passes. So a step's time is counted from the end of the
one before, and the first one's from its launch, as the device had nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl.core import PendingStep, StepOutput
from minisgl.engine import Engine
from minisgl.message import StepTrace

from .planner import Plan

__all__ = ["StepRecorder"]


class StepRecorder:
    """Told by a scheduler what it does; `take` gives the steps that were read since the last call.

    Set it as `Scheduler.recorder`. A step costs some ten microseconds more with it.
    """

    def __init__(self, device: torch.device, num_replayed: Callable[[], int] = lambda: 0) -> None:
        """`num_replayed` counts the steps so far that replayed a CUDA graph."""
        self._clock = _CudaClock(device) if device.type == "cuda" else None
        self._num_replayed = num_replayed
        self._replayed_before = 0
        self._plan_s = self._launch_s = 0.0
        self._start: torch.cuda.Event | None = None
        self._done: list[StepTrace] = []

    @classmethod
    def of(cls, engine: Engine) -> StepRecorder:
        """One for the steps of this engine."""
        return cls(engine.config.device, lambda: engine.num_replayed)

    def planning(self) -> None:
        """A plan begins; what was told of one that was not launched is forgotten."""
        self._plan_s = time.monotonic()

    def launching(self) -> None:
        """The plan is made, its launch begins."""
        self._launch_s = time.monotonic()
        self._replayed_before = self._num_replayed()
        if self._clock is not None:
            self._start = self._clock.mark()

    def launched(self, number: int, plan: Plan, pending: PendingStep) -> PendingStep:
        """Step `number` was launched; the scheduler is to read what is returned instead."""
        events = None
        if self._clock is not None:
            assert self._start is not None, "`launching` comes first"
            events = _Events(self._start, self._clock.mark())
        return _Recorded(
            self,
            pending,
            number,
            plan,
            self._num_replayed() > self._replayed_before,
            self._plan_s,
            self._launch_s,
            time.monotonic(),
            events,
        )

    def read(self, step: _Recorded, read_s: float, read_end_s: float) -> None:
        """The step's result was waited for, between these times."""
        device = _Span(step.launch_s, step.launched_s)  # on a CPU, launching is computing
        if self._clock is not None and step.events is not None:
            device = self._clock.span(step.events, step.launch_s)
        self._done.append(
            StepTrace(
                number=step.number,
                num_reqs=len(step.plan.reqs),
                num_decode_tokens=step.plan.num_decodes,
                num_prefill_tokens=step.plan.num_prefill_tokens,
                is_replayed=step.is_replayed,
                plan_s=step.plan_s,
                launch_s=step.launch_s,
                launched_s=step.launched_s,
                device_s=device.begin_s,
                device_end_s=device.end_s,
                read_s=read_s,
                read_end_s=read_end_s,
            )
        )

    def take(self) -> list[StepTrace]:
        """The steps that were read since the last call, in their order."""
        done, self._done = self._done, []
        return done


class _Events(NamedTuple):
    """What the device passes before a step and after it."""

    start: torch.cuda.Event
    end: torch.cuda.Event


class _Span(NamedTuple):
    """Seconds of the host's monotonic clock."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class _Recorded:
    """A launched step that tells its recorder when it is read."""

    recorder: StepRecorder
    pending: PendingStep
    number: int
    plan: Plan
    is_replayed: bool
    plan_s: float
    launch_s: float
    launched_s: float
    events: _Events | None

    def result(self) -> StepOutput:
        read_s = time.monotonic()
        output = self.pending.result()
        self.recorder.read(self, read_s, time.monotonic())
        return output


class _CudaClock:
    """When a device passed events, on the host's clock; steps must be asked for in their order.

    The two clocks drift apart, so each span is kept to what can be: not before its launch, after
    the span before, and not beyond the moment at which the host saw it done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None
        self._last_s = 0.0
        """The end of the last step: its event, and that on the host's clock."""
        self._seen_s = 0.0
        """When the host saw it done."""

    def mark(self) -> torch.cuda.Event:
        """An event that the device passes once it has done all that it was given up to now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def span(self, events: _Events, launch_s: float) -> _Span:
        """The span of a step whose result was read; `launch_s` is when its launch began."""
        # The tokens were read, but the step goes on until they are in the pool: microseconds.
        events.end.synchronize()
        seen_s, begin_s = time.monotonic(), launch_s
        if self._last is not None and self._seen_s > launch_s:  # it was launched behind that one
            gap_s = self._last.elapsed_time(events.start) / 1000
            begin_s = min(max(self._last_s + gap_s, launch_s), seen_s)
        end_s = min(begin_s + events.start.elapsed_time(events.end) / 1000, seen_s)
        self._last, self._last_s, self._seen_s = events.end, end_s, seen_s
        return _Span(begin_s, end_s)
