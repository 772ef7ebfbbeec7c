"""Integer arithmetic used wherever sizes are cut into pages or shards."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Span", "align_down", "align_up", "div_ceil", "div_even", "partition"]


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below a / b, for b > 0."""
    return -(-a // b)


def div_even(a: int, b: int, what: str = "value") -> int:
    """a / b, which must be exact; `what` names `a` in the error."""
    if a % b:
        raise ValueError(f"{what} = {a} is not divisible by {b}")
    return a // b


def align_up(a: int, unit: int) -> int:
    """Smallest multiple of `unit` not below `a`."""
    return div_ceil(a, unit) * unit


def align_down(a: int, unit: int) -> int:
    """Largest multiple of `unit` not above `a`."""
    return a // unit * unit


class Span(NamedTuple):
    """A contiguous range `[start, start + length)`."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def partition(total: int, rank: int, size: int) -> Span:
    """The rank's contiguous share of `total` items, by ceil division.

    Every rank but the last non-empty one holds `div_ceil(total, size)` items, so that sizes
    which the ranks do not divide work: 10 over 4 is 3, 3, 3, 1 and 5 over 4 is 2, 2, 1, 0.
    """
    share = div_ceil(total, size)
    start = min(rank * share, total)
    return Span(start, min(share, total - start))
