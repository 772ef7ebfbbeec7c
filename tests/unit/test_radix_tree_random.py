"""Random calls of the tree of prefixes, against a brute-force model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kvcache.radix_tree import Node, RadixTree
from tests.unit.radix_keys import key_of

SALTS = [None, None, "a"]
NUM_PAGES = 40


@dataclass
class Request:
    """Tokens and pages of a request: the first `handle.end` pages are the tree's."""

    salt: str | None
    tokens: list[int]
    handle: Node
    pages: list[int]


@dataclass
class Cached:
    """A page in the model of the tree, under (salt, all tokens up to the page's end)."""

    page: int
    last_use: int


# Few tokens and long runs of them, so that prefixes are shared, and diverge everywhere.
runs = st.sampled_from([[0], [1], [2], [0, 0, 0], [0, 0, 0, 0, 1]])
token_lists = st.lists(runs, max_size=4).map(lambda lists: sum(lists, []))


class TreeMachine(RuleBasedStateMachine):
    """Requests that come, publish, go and are evicted, each page having one owner at all times.

    The model knows of pages only, not of nodes: what is cached is a dict of prefixes, a page is
    locked if it is in a request's prefix, and the next page to evict is the oldest one that is
    unlocked and that no longer prefix needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[tuple[str | None, tuple[int, ...]], Cached] = {}
        self.requests: list[Request] = []
        self.free = list(range(NUM_PAGES))
        self.tick = 0

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size)

    def prefixes(self, salt: str | None, tokens: list[int]) -> list[Any]:
        """The model's keys of all whole pages of a sequence."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def brute_match(self, salt: str | None, tokens: list[int]) -> list[int]:
        """Pages of the longest cached prefix."""
        pages = []
        for prefix in self.prefixes(salt, tokens):
            if prefix not in self.cached:
                break
            pages.append(self.cached[prefix].page)
        return pages

    def locked(self) -> set[Any]:
        """The model's keys that requests hold."""
        return {p for r in self.requests for p in self.prefixes(r.salt, r.tokens)[: r.handle.end]}

    def call(self, method: Callable[..., Any], request: Request, *args: Any) -> Any:
        """Call the tree with a key that is overwritten afterwards, as a table's row would be."""
        key = bytearray(key_of(request.tokens))
        result = method(request.handle, key, request.handle.end, *args)
        key[:] = b"\x77" * len(key)
        return result

    def extend(self, request: Request, limit: int) -> None:
        """Move a request's lock deeper, its own pages of the same tokens becoming free."""
        start = request.handle.end
        expected = self.brute_match(request.salt, request.tokens)[start:limit]
        before = request.handle
        handle, pages = self.call(self.tree.extend, request, limit)
        assert pages == expected
        assert (handle is before) == (not pages)
        self.free += request.pages[start : start + len(pages)]
        request.pages[start : start + len(pages)] = pages
        request.handle = handle

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists, limit=st.integers(0, 20))
    def begin(self, salt: str | None, tokens: list[int], limit: int) -> None:
        handle = self.tree.root(salt)
        self.tree.lock(handle)
        self.requests.append(Request(salt, tokens, handle, []))
        self.extend(self.requests[-1], limit)
        self.grow(self.requests[-1], [])

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists, limit=st.integers(0, 20))
    def begin_and_end(self, salt: str | None, tokens: list[int], limit: int) -> None:
        self.begin(salt, tokens, limit)
        self.finish(self.requests[-1], len(tokens))

    def grow(self, request: Request, more: list[int]) -> None:
        """Give a request more tokens, and pages for all it has as long as some are free."""
        request.tokens = request.tokens + more
        missing = len(request.tokens) // self.size - len(request.pages)
        request.pages += [self.free.pop() for _ in range(min(missing, len(self.free)))]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=token_lists)
    def generate(self, data: st.DataObject, more: list[int]) -> None:
        self.grow(data.draw(st.sampled_from(self.requests)), more)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), limit=st.integers(0, 20))
    def extend_again(self, data: st.DataObject, limit: int) -> None:
        self.extend(data.draw(st.sampled_from(self.requests)), limit)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def publish(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        start = request.handle.end
        prefixes = self.prefixes(request.salt, request.tokens)[start:]
        known = bool(prefixes) and prefixes[0] in self.cached
        assert self.call(self.tree.has_child, request) == known
        pages = request.pages[start : start + count]
        if known and pages:
            with pytest.raises(RuntimeError, match="in the tree already"):
                self.call(self.tree.insert, request, pages)
            return
        request.handle = self.call(self.tree.insert, request, pages)
        self.cached |= {p: Cached(page, 0) for p, page in zip(prefixes, pages, strict=False)}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A second request with the same handle."""
        first = data.draw(st.sampled_from(self.requests))
        self.tree.lock(first.handle)
        end = first.handle.end
        self.requests.append(Request(first.salt, first.tokens, first.handle, first.pages[:end]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 9))
    def end(self, data: st.DataObject, count: int) -> None:
        self.finish(data.draw(st.sampled_from(self.requests)), count)

    def finish(self, request: Request, count: int) -> None:
        """End a request, merging `count` of its own pages and freeing the others."""
        self.requests.remove(request)
        start = request.handle.end
        own = request.pages[start:]
        pages = own[:count]
        prefixes = self.prefixes(request.salt, request.tokens)[: start + len(pages)]
        known = sum(prefix in self.cached for prefix in prefixes[start:])
        duplicates = self.call(self.tree.merge, request, pages)
        assert duplicates == pages[:known]
        self.free += duplicates + own[count:]
        self.tick += 1
        for prefix, page in zip(prefixes, request.pages, strict=False):
            self.cached.setdefault(prefix, Cached(page, 0)).last_use = self.tick

    @precondition(lambda self: self.cached)
    @rule(count=st.integers(0, 8))
    def evict(self, count: int) -> None:
        locked = self.locked()
        expected: list[int] = []
        while len(expected) < count:
            needed = {(salt, tokens[: -self.size]) for salt, tokens in self.cached}
            leaves = [p for p in self.cached if p not in locked and p not in needed]
            if not leaves:
                break
            oldest = min(leaves, key=lambda prefix: self.cached[prefix].last_use)
            expected.append(self.cached.pop(oldest).page)
        evicted = self.tree.evict(count)
        assert sorted(evicted) == sorted(expected)
        self.free += evicted

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists, limit=st.integers(0, 9))
    def match(self, salt: str | None, tokens: list[int], limit: int) -> None:
        expected = self.brute_match(salt, tokens)[:limit]
        found = self.tree.find(salt, key_of(tokens), limit)
        assert found.end == len(expected)
        unlocked = self.prefixes(salt, tokens)[: len(expected)]
        assert found.num_unlocked_pages == len(set(unlocked) - self.locked())
        if found.node is not None:
            assert found.node.end == found.end
            path = list(found.node.upwards())[::-1]
            assert [page for node in path for page in node.pages] == expected

    @invariant()
    def tree_is_sound_and_as_the_model(self) -> None:
        self.tree.check_integrity([request.handle for request in self.requests])
        cached = sorted(entry.page for entry in self.cached.values())
        assert sorted(self.tree.pages()) == cached
        assert self.tree.num_pages == len(cached)
        assert self.tree.num_unlocked_pages == len(self.cached.keys() - self.locked())
        salts = {salt for salt, _ in self.cached} | {request.salt for request in self.requests}
        assert set(self.tree._roots) == salts

    @invariant()
    def each_page_has_one_owner(self) -> None:
        private = [page for r in self.requests for page in r.pages[r.handle.end :]]
        assert sorted([*self.free, *private, *self.tree.pages()]) == list(range(NUM_PAGES))

    @invariant()
    def handles_stand_for_what_they_were_given(self) -> None:
        for request in self.requests:
            found = self.brute_match(request.salt, request.tokens)
            end = request.handle.end
            path = list(request.handle.upwards())[::-1]
            assert [p for node in path for p in node.pages] == request.pages[:end] == found[:end]
            assert b"".join(n.key for n in path) == key_of(request.tokens[: end * self.size])
            assert self.tree.find(request.salt, key_of(request.tokens), 99).end == len(found)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
