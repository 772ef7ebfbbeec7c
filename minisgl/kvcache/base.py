"""What all caches have in common: page arithmetic, and pages that belong to one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import NamedTuple

from minisgl.core import Req
from minisgl.utils import div_ceil

from .allocator import PageAllocator

__all__ = ["KVCache", "Match"]


class Match(NamedTuple):
    """What of a waiting request's tokens is cached."""

    num_tokens: int = 0
    num_unlocked_pages: int = 0
    """Pages of these that nobody reads yet: available, until the request begins."""
    place: object = None
    """Where in the cache the match ends, if others can go on there."""


class KVCache:
    """Gives running requests the pages they need next, and takes them back; shares nothing.

    A request's pages cover `[0, len(pages) * page_size)` of its tokens. All page arithmetic of
    the engine is here and in the subclasses; everything else counts in tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        """All pages, free or not."""
        return self.allocator.num_pages

    @property
    def num_cached_pages(self) -> int:
        """Pages that the prefix cache owns, whether or not a request reads them now."""
        return 0

    @property
    def num_available_pages(self) -> int:
        """Pages that can be handed out: free ones, and cached ones that nobody reads."""
        return self.allocator.num_free

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that could run, alone."""
        return self.num_pages * self.page_size

    # -- sharing, which a subclass may do --------------------------------------------------

    def match(self, req: Req) -> Match:
        """What `begin` would find now for a waiting request; locks, ages, splits nothing."""
        return Match()

    def begin(self, req: Req) -> list[int]:
        """A request starts: the cached pages of its first tokens, now also `req.pages`; its
        lengths move up over them."""
        return []

    def publish(self, req: Req) -> None:
        """Let others read the full pages of `[0, cached_len)` while the request still runs."""

    def next_page(self, req: Req) -> Hashable | None:
        """Names the page that a running request computes next, by its tokens and all before;
        None if these can't be shared."""
        return None

    def awaits(self, req: Req, match: Match, computing: Container[Hashable]) -> bool:
        """Whether the page that a waiting request would compute first is one of `computing`,
        which others compute in this step: then it can read that page in the next one."""
        return False

    def flush(self) -> int:
        """Forget all cached pages that nobody reads now; returns how many."""
        return 0

    # -- pages of one request --------------------------------------------------------------

    def missing_pages(self, req: Req, length: int) -> int:
        """Pages that a request lacks to hold `length` tokens."""
        return max(0, div_ceil(length, self.page_size) - len(req.pages))

    def room_for(self, req: Req) -> int:
        """Tokens this request can grow to (its length then) with the available pages."""
        return (len(req.pages) + self.num_available_pages) * self.page_size

    def grow(self, req: Req, length: int) -> list[int] | None:
        """Pages added so that `length` tokens fit, or None (and no change) if too few are left."""
        missing = self.missing_pages(req, length)
        if missing == 0:
            return []
        if missing > self.num_available_pages:
            return None
        self._make_free(missing)
        pages = self.allocator.allocate(missing)
        req.pages += pages
        return pages

    def end(self, req: Req) -> None:
        """Take all pages of a request back."""
        self.allocator.free(req.pages)
        req.pages = []

    def _make_free(self, count: int) -> None:
        """Bring the free list to `count` pages; they are available."""

    # -- conservation ----------------------------------------------------------------------

    def check_counts(self, holders: Sequence[Req]) -> None:
        """Raise unless free + cached + in use = all pages; costs little, so done when idle."""
        private = sum(len(req.pages) - req.num_shared for req in holders)
        free, cached = self.allocator.num_free, self.num_cached_pages
        if free + cached + private != self.num_pages:
            raise RuntimeError(
                f"Pages lost: {free} free + {cached} cached + {private} in use of {self.num_pages}"
            )

    def check_integrity(self, holders: Sequence[Req]) -> None:
        """Raise unless every page has exactly one owner: the free list, the prefix cache or one
        of the requests that hold pages; looks at every page."""
        self.check_counts(holders)
        owned = Counter(self.allocator.free_pages())
        owned.update(self.cached_pages())
        for req in holders:
            owned.update(req.pages[req.num_shared :])
        wrong = {page: owned[page] for page in range(self.num_pages) if owned[page] != 1}
        if wrong or len(owned) != self.num_pages:
            raise RuntimeError(f"Pages without exactly one owner (page: owners): {wrong}")

    def cached_pages(self) -> Iterable[int]:
        """The pages that the prefix cache owns."""
        return ()
