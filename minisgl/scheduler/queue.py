"""The requests that wait, and in which order they may start."""

from __future__ import annotations

from bisect import insort

from minisgl.core import Req
from minisgl.kvcache import KVCache

__all__ = ["LPM_MAX_WAIT", "LPM_WINDOW", "WaitingQueue", "turn"]

LPM_WINDOW = 128
"""Waiting requests, from the first in turn, whose cached prefixes `lpm` compares in a step."""
LPM_MAX_WAIT = 32
"""Steps after a request first stood first in turn, until it is the next to start when it does."""


def turn(req: Req) -> tuple[int, int]:
    """Orders requests by priority, then arrival; a retracted one keeps its arrival."""
    return req.priority, req.arrival


class WaitingQueue:
    """Waiting requests in turn, whatever the policy; `candidates` puts them into its order.

    `fcfs` is first come, first served. `lpm` takes the longest cached prefix first, among equal
    priorities, so that a prefix is used before it is evicted; but who stood first in turn
    `LPM_MAX_WAIT` steps ago goes before all others as soon as it stands there. Then the next one
    is first, so nobody starves.
    """

    def __init__(self, policy: str = "fcfs") -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"Unknown policy {policy!r}: choose from fcfs, lpm")
        self._lpm = policy == "lpm"
        self._reqs: list[Req] = []
        self._first_since: dict[int, int] = {}  # uid: step in which it first stood first

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Req) -> None:
        """Queue a new or retracted request at its turn."""
        insort(self._reqs, req, key=turn)

    def remove(self, req: Req) -> None:
        """Take a request out that starts or is aborted."""
        self._reqs.remove(req)
        self._first_since.pop(req.uid, None)

    def candidates(self, cache: KVCache, step: int, count: int) -> list[Req]:
        """At most `count` requests in the order in which they may start in step number `step`."""
        if not self._reqs or not self._lpm:
            return self._reqs[:count]
        first, *rest = self._reqs[:LPM_WINDOW]
        since = self._first_since.setdefault(first.uid, step)
        if step - since < LPM_MAX_WAIT:
            rest.append(first)
            ahead = []
        else:
            ahead = [first]
        hits = {req.uid: cache.match(req).num_tokens for req in rest}
        rest.sort(key=lambda req: (req.priority, -hits[req.uid], req.arrival))
        return (ahead + rest)[:count]
