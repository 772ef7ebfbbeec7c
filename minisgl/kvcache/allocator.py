"""The free list of the pool's pages."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page numbers `0 .. num_pages - 1`, the most recently freed first.

    The order is a stack, not a set, so that every rank hands out the same pages. Pages that
    nobody ever had are only counted: a pool may have millions, and making it takes no time.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._freed: list[int] = []
        self._first_unused = 0  # it and all after it were never handed out
        self._is_free = bytearray(b"\1") * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._freed) + self.num_pages - self._first_unused

    def free_pages(self) -> list[int]:
        """The free pages, for integrity checks."""
        return [*self._freed, *range(self._first_unused, self.num_pages)]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that `num_free` is enough."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages asked for, {self.num_free} are free")
        pages = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        first, self._first_unused = self._first_unused, self._first_unused + count - len(pages)
        pages += range(first, self._first_unused)
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; freeing one twice is an error, found before anything changes."""
        twice = [p for p in pages if self._is_free[p]]
        if twice or len(set(pages)) != len(pages):
            raise RuntimeError(f"Pages freed twice: {twice or sorted(pages)}")
        for page in reversed(pages):
            self._is_free[page] = 1
            self._freed.append(page)
