"""The requests that wait, and in which order they may start."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from minisgl.core import Req
from minisgl.kvcache import KVCache

__all__ = ["LPM_MAX_WAIT", "LPM_WINDOW", "WaitingQueue", "turn"]

LPM_WINDOW = 128
"""Waiting requests, from the first in turn, whose cached prefixes `lpm` compares in a step."""
LPM_MAX_WAIT = 32
"""Steps since `lpm` first looked at who is first in turn, until that one is the next to start."""


def turn(req: Req) -> tuple[int, int]:
    """Orders requests by priority, then arrival; a retracted one keeps its arrival."""
    return req.priority, req.arrival


class WaitingQueue:
    """Waiting requests in turn, whatever the policy; `candidates` puts them into its order.

    `fcfs` is first come, first served. `lpm` takes the longest cached prefix first, among equal
    priorities, so that a prefix is used before it is evicted; but whoever was first in turn for
    `LPM_MAX_WAIT` steps goes before all others. As the next one is then first, nobody starves.
    """

    def __init__(self, policy: str = "fcfs") -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"Unknown policy {policy!r}: choose from fcfs, lpm")
        self._lpm = policy == "lpm"
        self._reqs: list[Req] = []
        self._first_uid: int | None = None
        self._first_since = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        """Queue a new or retracted request at its turn."""
        insort(self._reqs, req, key=turn)

    def remove(self, req: Req) -> None:
        """Take a request out that starts or is aborted."""
        self._reqs.remove(req)
        if req.uid == self._first_uid:
            self._first_uid = None  # retracted, it waits anew

    def candidates(self, cache: KVCache, step: int, count: int) -> list[Req]:
        """At most `count` requests in the order in which they may start in step number `step`."""
        if not self._reqs or not self._lpm:
            return self._reqs[:count]
        first = self._reqs[0]
        if first.uid != self._first_uid:
            self._first_uid, self._first_since = first.uid, step
        rest = self._reqs[:LPM_WINDOW]
        overdue = []
        if step - self._first_since >= LPM_MAX_WAIT:
            overdue, rest = rest[:1], rest[1:]
        longest_first = sorted(rest, key=lambda req: (req.priority, -cache.match(req), req.arrival))
        return (overdue + longest_first)[:count]
