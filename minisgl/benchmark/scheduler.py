"""`minisgl bench scheduler`: what the host does for a step and for a prefix, without a model.

A decode step is one `Scheduler.step()` in which every running request decodes: planning, the
batch's arrays, launching, delivering. Its executor computes nothing: a launch is one look-up of
a finished step, some 0.2 us, which the figures include. The engine's own work on the host (input
tensors, kernel launches) comes on top of them.

The prompts' lengths differ, so that in each step one request in `page_size` gets a new page and
publishes its last one. Python's garbage collector stays on, as it does when serving.
"""

from __future__ import annotations

import functools
import gc
import platform
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from minisgl.core import Batch, FinishedStep, PageWrites, Req, SamplingParams, StepOutput
from minisgl.kvcache import RadixCache
from minisgl.scheduler import Limits, Scheduler, Update
from minisgl.utils import div_ceil

from .prefix import bench_prefix
from .timing import Timer, percentiles

__all__ = ["TARGET_RUNNING", "TARGET_US", "bench_scheduler"]

TARGET_RUNNING = 256
TARGET_US = 1000.0
"""The host's work for a step of `TARGET_RUNNING` requests is to stay below this."""

WARM_UP_STEPS = 32
"""Steps before the measured ones."""
PROMPT_LEN = 128
TOKEN, STOP = 7, 1
VOCAB_SIZE = 49_152


def bench_scheduler(
    *, running: Sequence[int], cached: Sequence[int], steps: int, page_size: int
) -> dict[str, Any]:
    """Cost of decode steps with so many running requests, of prefixes with so many cached.

    `steps` is at least `2 * page_size`: every request grows twice.
    """
    return {
        "benchmark": "scheduler",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "page_size": page_size,
        "steps": steps,
        "gc_enabled": gc.isenabled(),
        "decode": [
            _decode(count, steps, page_size, overlap)
            for count in running
            for overlap in (False, True)
        ],
        "prefix": [bench_prefix(count, page_size) for count in cached],
    }


class _NoModel:
    """An executor that samples `TOKEN` for all of a batch: no prompt here comes in parts."""

    def attach(self, req: Req) -> None:
        pass

    def set_pages(self, writes: PageWrites) -> None:
        pass

    def launch(self, batch: Batch) -> FinishedStep:
        return _done(len(batch.reqs))


@functools.cache
def _done(size: int) -> FinishedStep:
    return FinishedStep(StepOutput([TOKEN] * size))


class _Collections:
    """The time that the garbage collector takes inside a block."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._start_ns = 0

    def __enter__(self) -> _Collections:
        gc.callbacks.append(self._called)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        now = time.thread_time_ns()
        if phase == "start":
            self._start_ns = now
        else:
            self.total_ns += now - self._start_ns


def _decode(running: int, steps: int, page_size: int, overlap: bool) -> dict[str, Any]:
    """Measure `steps` steps in which all requests decode, then run these to their end."""
    output_len = WARM_UP_STEPS + steps + 1  # one more: with overlap, launches are a step ahead
    reqs = _requests(running, page_size, output_len)
    scheduler = _scheduler(reqs, page_size, overlap)
    received: Counter[int] = Counter()
    _take([update for _ in range(WARM_UP_STEPS) for update in scheduler.step()], received)
    timer = Timer()
    gc.collect()  # what was made before is not to be charged to the steps
    with _Collections() as collections:
        for _ in range(steps):
            updates = timer.run(scheduler.step)
            if len(updates) != running:
                raise RuntimeError(f"{len(updates)} of {running} requests decoded in a step")
            _take(updates, received)
            del updates  # here, since freeing them is no work of the scheduler
    ended = []
    while scheduler.has_work:
        ended += _take(scheduler.step(), received)
    scheduler.check_integrity()
    if received != dict.fromkeys(range(running), output_len) or sorted(ended) != [*range(running)]:
        raise RuntimeError(f"{output_len} tokens for each of {running} requests became {received}")
    figures = percentiles(timer.times_us)
    row: dict[str, Any] = {
        "running": running,
        "loop": "overlap" if overlap else "plain",
        "output_tokens": sum(received.values()),
        "step_us": figures,
        "us_per_request": round(figures["p50"] / running, 3),
        "gc_us_per_step": round(collections.total_ns / 1000 / steps, 2),
    }
    if running == TARGET_RUNNING:
        row["share_of_target"] = round(figures["p50"] / TARGET_US, 3)
    return row


def _requests(running: int, page_size: int, output_len: int) -> list[Req]:
    """Requests for `output_len` tokens, without a page in common."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0).resolve_defaults({})
    reqs = []
    for uid in range(running):
        # The first token tells them apart: else one might wait for what another computes.
        prompt = [uid, *rng.integers(0, VOCAB_SIZE, PROMPT_LEN - 1 + uid % page_size).tolist()]
        reqs.append(
            Req(
                uid=uid,
                token_ids=prompt,
                prompt_len=len(prompt),
                params=params,
                max_len=len(prompt) + output_len,
                stop_ids=frozenset({STOP}),
                eos_ids=frozenset({STOP}),
            )
        )
    return reqs


def _scheduler(reqs: Sequence[Req], page_size: int, overlap: bool) -> Scheduler:
    """A scheduler with these requests queued, and room for all of them from the first step."""
    pages = sum(div_ceil(req.max_len, page_size) + 1 for req in reqs)
    limits = Limits(
        max_running_requests=len(reqs),
        token_budget=sum(req.prompt_len for req in reqs),
        max_model_len=max(req.max_len for req in reqs),
    )
    scheduler = Scheduler(_NoModel(), RadixCache(pages, page_size), limits, overlap=overlap)
    for req in reqs:
        scheduler.add(req)
    return scheduler


def _take(updates: list[Update], received: Counter[int]) -> list[int]:
    """Count the tokens; returns the requests that these updates end by their length."""
    received.update(update.uid for update in updates if update.token_id == TOKEN)
    return [update.uid for update in updates if update.finish_reason == "length"]
