"""A cache that shares nothing: each request's pages are its own."""

from __future__ import annotations

from minisgl.core import Req
from minisgl.utils import div_ceil

from .allocator import PageAllocator

__all__ = ["NaiveCache"]


class NaiveCache:
    """Gives running requests the pages they need next, and takes them back.

    A request's pages cover `[0, len(pages) * page_size)` of its tokens; all page arithmetic of
    the scheduler is here.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        """All pages, free or not."""
        return self.allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self.allocator.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that could run, alone."""
        return self.num_pages * self.page_size

    def begin(self, req: Req) -> int:
        """Tokens of the request whose keys and values are cached already: none, here."""
        return 0

    def room_for(self, req: Req) -> int:
        """Tokens this request can grow to (its length then) with the pages that are free."""
        return (len(req.pages) + self.num_free_pages) * self.page_size

    def grow(self, req: Req, length: int) -> list[int] | None:
        """Pages added so that `length` tokens fit, or None (and no change) if too few are free."""
        missing = div_ceil(length, self.page_size) - len(req.pages)
        if missing <= 0:
            return []
        if missing > self.num_free_pages:
            return None
        pages = self.allocator.allocate(missing)
        req.pages += pages
        return pages

    def end(self, req: Req) -> None:
        """Take all pages of a request back."""
        self.allocator.free(req.pages)
        req.pages = []

    def check_integrity(self, running: list[Req]) -> None:
        """Raise unless every page is free or held by exactly one of the running requests."""
        held = [page for req in running for page in req.pages]
        if len(set(held)) != len(held) or self.num_free_pages + len(held) != self.num_pages:
            raise RuntimeError(
                f"Pages lost or shared: {self.num_free_pages} free + {len(held)} held "
                f"({len(set(held))} distinct) of {self.num_pages}"
            )
