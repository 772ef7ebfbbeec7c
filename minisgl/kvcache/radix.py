"""The prefix cache: requests that begin with the same tokens share the pages of these.

    req.pages   | shared: the tree's, locked by req | its own |
                0                          num_shared

A request's first pages belong to the tree, which may have got them from it: as soon as a page is
full it is offered to the tree (`publish`). If the tree already has these tokens in another page,
the request keeps its copy, and all pages after it, to itself until it ends. Thus a page that stands
in the page table of a running request stays there until the request gives up its row: no table is
rewritten under a step.

A page is full once the step that fills it is launched. Whoever finds it in the tree can only read
it in a later step, and the device computes steps in their order; if one is lost, all is flushed.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from minisgl.core import Req

from .base import KVCache, Match
from .radix_tree import TOKEN_BYTES, Node, RadixTree

__all__ = ["RadixCache"]


@dataclass(eq=False)
class _Handle:
    """A request's tokens as int32 bytes, extended when asked for, and while it runs its place."""

    key: bytearray = field(default_factory=bytearray)
    node: Node | None = None

    def get_node(self) -> Node:
        """Where the shared pages of a running request end."""
        if self.node is None:
            raise RuntimeError("The request has not begun, or has ended")
        return self.node


class RadixCache(KVCache):
    """Pages owned by a radix tree over token ids (SGLang's RadixAttention, Zheng et al. 2024).

    Matching is page by page and never includes the last known token: a step must compute at
    least one. Pages nobody reads stay until others need them, the least recently used first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.tree = RadixTree(page_size)

    @property
    def num_cached_pages(self) -> int:
        """Pages of the tree."""
        return self.tree.num_pages

    @property
    def num_available_pages(self) -> int:
        """Free pages, and those of the tree that no running request reads."""
        return self.allocator.num_free + self.tree.num_unlocked_pages

    def match(self, req: Req) -> Match:
        """What of a waiting request's tokens is cached; no lock, no age, no node changes."""
        found = self.tree.find(req.cache_salt, _handle(req).key, self._most(req))
        return Match(found.end * self.page_size, found.num_unlocked_pages, found.node)

    def begin(self, req: Req) -> list[int]:
        """Lock the cached pages of a request that starts, until `end`; it won't compute them."""
        handle = _handle(req)
        root = self.tree.root(req.cache_salt)
        self.tree.lock(root)
        handle.node, pages = self.tree.extend(root, handle.key, 0, self._most(req))
        req.pages, req.num_shared = list(pages), len(pages)
        req.cached_len = req.device_len = len(pages) * self.page_size
        return pages

    def publish(self, req: Req) -> None:
        """Give the request's full pages to the tree, unless the tree has their tokens already."""
        first, full = req.num_shared, self._full(req)
        if full <= first:
            return
        handle = _handle(req)
        node = handle.get_node()
        if not self.tree.has_child(node, handle.key, first):
            handle.node = self.tree.insert(node, handle.key, first, req.pages[first:full])
            req.num_shared = full

    def next_page(self, req: Req) -> Hashable | None:
        """The place in the tree where the request's shared pages end, and the tokens that follow.

        None if it has computed beyond that place, or does not know a whole page of tokens yet.
        """
        page = req.cached_len // self.page_size
        if page != req.num_shared or (page + 1) * self.page_size > len(req.token_ids):
            return None
        handle = _handle(req)
        return handle.get_node(), self._page_of(handle, page)

    def awaits(self, req: Req, match: Match, computing: Container[Hashable]) -> bool:
        """See `KVCache.awaits`: who computes goes on where its shared pages, a node, end."""
        page = match.num_tokens // self.page_size
        if match.place is None or page >= self._most(req):
            return False
        return (match.place, self._page_of(_handle(req), page)) in computing

    def flush(self) -> int:
        """Forget what no running request reads; returns the number of pages freed."""
        pages = self.tree.evict(self.tree.num_unlocked_pages)
        self.allocator.free(pages)
        return len(pages)

    def end(self, req: Req) -> None:
        """Unlock the shared pages; full pages of its own go to the tree, the rest is free."""
        handle, first = _handle(req), req.num_shared
        full = max(first, self._full(req))
        own = req.pages[first:full]
        duplicates = self.tree.merge(handle.get_node(), handle.key, first, own)
        handle.node = None
        self.allocator.free(duplicates + req.pages[full:])
        req.pages, req.num_shared = [], 0

    def check_integrity(self, holders: Sequence[Req]) -> None:
        """As the base; and the tree is whole, locked by these requests and no others, and its
        pages are the ones that they read."""
        super().check_integrity(holders)
        nodes = []
        for req in holders:
            node = _handle(req).get_node()
            nodes.append(node)
            path = [page for above in reversed([*node.upwards()]) for page in above.pages]
            if path != req.pages[: req.num_shared]:
                raise RuntimeError(f"{req} reads {req.pages[: req.num_shared]}, tree has {path}")
        self.tree.check_integrity(nodes)

    def _most(self, req: Req) -> int:
        """Pages that a request may read instead of computing them.

        Not the page of its last token; and where prompt logprobs are wanted, no token whose
        logits are still to be scored.
        """
        tokens = len(req.token_ids) - 1
        if req.params.prompt_logprobs is not None and req.num_prompt_logprobs < req.prompt_len - 1:
            tokens = min(tokens, req.num_prompt_logprobs)
        return tokens // self.page_size

    def _page_of(self, handle: _Handle, page: int) -> bytes:
        size = TOKEN_BYTES * self.page_size
        return bytes(handle.key[page * size : (page + 1) * size])

    def _full(self, req: Req) -> int:
        """Pages whose tokens are all computed, or will be by launched steps, and all known."""
        return min(req.cached_len, len(req.token_ids)) // self.page_size

    def _make_free(self, count: int) -> None:
        missing = count - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.tree.evict(missing))

    def cached_pages(self) -> Iterable[int]:
        """The pages that the prefix cache owns."""
        return self.tree.pages()


def _handle(req: Req) -> _Handle:
    """The request's handle with its key brought up to the tokens known now."""
    handle = req.cache_handle
    if not isinstance(handle, _Handle):
        req.cache_handle = handle = _Handle()
    known = len(handle.key) // TOKEN_BYTES
    if known < len(req.token_ids):
        handle.key += array("i", req.token_ids[known:]).tobytes()
    return handle
