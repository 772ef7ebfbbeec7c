"""Times as the figures that reports show, and a clock for what takes microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Timer", "percentiles"]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99, to two decimals; a percentile is one of the values."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    mean = round(statistics.fmean(ordered), 2)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


class Timer:
    """The microseconds of each call, in this thread's CPU time.

    The turns of other processes, milliseconds on a busy machine, are thus no part of them; nor
    is what reading the clock takes, which is measured here and taken off.
    """

    def __init__(self) -> None:
        self.times_us: list[float] = []
        self._cost_ns = 0
        for _ in range(100):
            self.run(int)
        self._cost_ns = int(statistics.median(self.times_us) * 1000)
        self.times_us.clear()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function, note its time, return its result."""
        start = time.thread_time_ns()
        result = function(*arguments)
        self.times_us.append((time.thread_time_ns() - start - self._cost_ns) / 1000)
        return result
