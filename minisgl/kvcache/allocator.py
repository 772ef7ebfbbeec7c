"""The free list of the pool's pages."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PageAllocator"]


class PageAllocator:
    """Hands out page numbers `0 .. num_pages - 1`, the most recently freed first.

    The order is a stack, not a set, so that every rank hands out the same pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1") * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    def free_pages(self) -> Sequence[int]:
        """The free pages, for integrity checks."""
        return self._free

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that `num_free` is enough."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
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
            self._free.append(page)
