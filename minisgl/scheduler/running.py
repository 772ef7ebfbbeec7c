"""The requests that own a row and pages.

    start: row, cached pages --> grow: new pages --> end: all back
                                   |                   ^
                                   +- finish .. close -+  when no step in flight has it

Invariant: every row is free or belongs to exactly one request of `reqs` or `_closing`, and these
are all that hold pages.
"""

from __future__ import annotations

from bisect import insort

from minisgl.core import Executor, PageWrites, Req
from minisgl.kvcache import KVCache

from .queue import turn

__all__ = ["RunningSet"]


class RunningSet:
    """Rows, pages and page-table entries of the running requests, in turn (see `turn`)."""

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self.cache = cache
        self.reqs: list[Req] = []
        self._closing: list[Req] = []  # finished, and a step in flight still writes for them
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        # What the executor has not been told yet:
        self._unattached: list[Req] = []
        self._entries: list[tuple[int, int, list[int]]] = []  # row, first column, pages
        self._fresh: list[int] = []

    @property
    def has_free_row(self) -> bool:
        """Whether another request can start."""
        return bool(self._free_rows)

    def start(self, req: Req) -> None:
        """Give a waiting request a row and the cached pages of its first tokens."""
        pages = self.cache.begin(req)
        req.row = self._free_rows.pop()
        insort(self.reqs, req, key=turn)
        self._unattached.append(req)
        self._entries.append((req.row, 0, pages))

    def grow(self, req: Req, length: int) -> bool:
        """Pages for `length` tokens; False, and no change, if there are too few."""
        first = len(req.pages)
        pages = self.cache.grow(req, length)
        if pages is None:
            return False
        self._entries.append((req.row, first, pages))
        self._fresh += pages
        return True

    def end(self, req: Req) -> None:
        """Take row and pages back."""
        self.reqs.remove(req)
        self._give_back(req)

    def finish(self, req: Req) -> None:
        """The request is over: it ends now, or when the steps in flight with it are done."""
        req.finished = True
        if req.num_in_flight:
            self.reqs.remove(req)
            self._closing.append(req)
        else:
            self.end(req)

    def close(self, req: Req) -> None:
        """End a finished request: no step in flight has it any more."""
        self._closing.remove(req)
        self._give_back(req)

    def attach_to(self, executor: Executor) -> None:
        """Tell the executor which requests started and which table entries changed.

        Forgotten only after `launched`, so that a launch that fails can be tried again.
        """
        for req in self._unattached:
            executor.attach(req)
        writes = PageWrites([], [], [], self._fresh)
        for row, first, pages in self._entries:
            writes.rows.extend([row] * len(pages))
            writes.columns.extend(range(first, first + len(pages)))
            writes.pages.extend(pages)
        if writes.pages:
            executor.set_pages(writes)

    def launched(self) -> None:
        """A step was launched with what `attach_to` told."""
        self._unattached, self._entries, self._fresh = [], [], []

    def holders(self) -> list[Req]:
        """All requests that hold pages."""
        return self.reqs + self._closing

    def check_integrity(self) -> None:
        """Raise unless every page and every row has exactly one owner."""
        self.cache.check_integrity(self.holders())
        rows = sorted([req.row for req in self.holders()] + self._free_rows)
        if rows != list(range(self._num_rows)):
            raise RuntimeError(f"Rows lost or shared: {rows}, of {self._num_rows}")

    def _give_back(self, req: Req) -> None:
        if req.num_in_flight:
            raise RuntimeError(f"{req} ends while {req.num_in_flight} steps in flight write for it")
        if req in self._unattached:
            self._unattached.remove(req)
        self._entries = [entry for entry in self._entries if entry[0] != req.row]
        self.cache.end(req)
        self._free_rows.append(req.row)
        req.row, req.cached_len, req.device_len = -1, 0, 0
