"""Generations and stats whose times and counts a test chooses, for the tests of observers."""

from __future__ import annotations

from typing import Any

from minisgl.core import SamplingParams
from minisgl.message import EngineStats, RequestStart, SequenceDelta, StepTrace
from minisgl.server.generation import Generation, Observer


def generation(
    n: int = 1, *, request_id: str = "cmpl-1", first_uid: int = 7, submitted_s: float = 100.0
) -> Generation:
    """A request of three prompt tokens, submitted at 100 s."""
    made = Generation(request_id, first_uid, [1, 2, 3], SamplingParams(n=n), lambda _: None)
    made.submitted_s = submitted_s
    return made


def deliver(
    observer: Observer,
    to: Generation,
    now_s: float,
    token_ids: tuple[int, ...] = (5,),
    *,
    choice: int = 0,
    start: RequestStart | None = None,
    finish_reason: str | None = None,
) -> None:
    """Give a sequence a delta as an engine would, and tell the observer."""
    delta = SequenceDelta(to.first_uid + choice, "x", list(token_ids), [], finish_reason)
    delta.start = start
    to.push(delta)
    if to.finished:
        to.ended_s = now_s
    observer.on_delta(to, delta, now_s)
    if to.finished:
        observer.on_end(to)


def stats(time_s: float, num_steps: int, **counts: Any) -> EngineStats:
    """The state after a step of 0.25 s; every count not given is 0, of 100 pages."""
    names = EngineStats.__struct_fields__[2:]
    given = {"num_pages": 100, "num_steps": num_steps, **counts}
    return EngineStats(time_s, 0.25, **{name: given.get(name, 0) for name in names})


def step(number: int, plan_s: float = 1.0, **facts: Any) -> StepTrace:
    """A step of one request, planned, launched, computed and read in quarters of a second."""
    times = {
        "plan_s": plan_s,
        "launch_s": plan_s + 0.25,
        "launched_s": plan_s + 0.5,
        "device_s": plan_s + 0.5,
        "device_end_s": plan_s + 1.25,
        "read_s": plan_s + 1.0,
        "read_end_s": plan_s + 1.25,
    }
    counts = {"num_reqs": 1, "num_decode_tokens": 1, "num_prefill_tokens": 0}
    return StepTrace(number, **{**counts, "is_replayed": False, **times, **facts})
