"""When requests are sent: open loop at a rate, closed loop at a concurrency, or both.

    open loop     --request-rate 8    at times drawn beforehand, however the server fares
    closed loop   --concurrency 16    all are due at once; each that ends lets the next one go

Invariant: a request leaves at its time or, where there is a limit, as soon after it as a slot is
free. What the client is later than that is its own lag, which is measured.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .client import Reply

__all__ = ["Departure", "arrival_times", "drive"]

_ARRIVALS = 2  # the stream of random numbers; `load.py` has the others


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due: a Poisson process of `rate` a second.

    The first is due at once; with an infinite rate all are.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(1 / rate, count)
    gaps[:1] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times


@dataclass(frozen=True)
class Departure:
    """A request that was sent, and what became of it."""

    ready_s: float
    """when it was to leave, by the clock of the reply's times"""
    held: bool
    """whether that was later than its time, for want of a slot"""
    reply: Reply

    @property
    def lag_s(self) -> float:
        """Seconds that the client was late in sending it."""
        return self.reply.sent_s - self.ready_s


async def drive(
    bodies: Sequence[bytes],
    send: Callable[[bytes], Awaitable[Reply]],
    *,
    due_s: Sequence[float],
    concurrency: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> list[Departure]:
    """Send each body when it is due (ascending seconds); returns what became of each, in order."""
    slots = asyncio.Semaphore(concurrency or max(1, len(bodies)))

    async def leave(body: bytes, ready_s: float, held: bool) -> Departure:
        try:
            return Departure(ready_s, held, await send(body))
        finally:
            slots.release()

    start_s = clock()
    free_s = start_s  # when the last one that had to wait for a slot got it
    tasks = []
    for body, due in zip(bodies, due_s, strict=True):
        at_s = start_s + due
        while (early_s := at_s - clock()) > 0:
            await sleep(early_s)
        blocked = slots.locked()
        await slots.acquire()
        if blocked:
            free_s = clock()
        tasks.append(asyncio.create_task(leave(body, max(at_s, free_s), free_s > at_s)))
    return list(await asyncio.gather(*tasks))
