"""The tree of prefixes: against a brute-force model, and by example."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kvcache import radix_tree
from minisgl.kvcache.radix_tree import Node, RadixTree

SALTS = [None, None, "a"]
NUM_PAGES = 40


def key_of(tokens: list[int]) -> bytes:
    """Token ids as the tree takes them."""
    return np.array(tokens, dtype="<i4").tobytes()


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
        assert self.tree.match(salt, key_of(tokens), limit) == len(expected)

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
            assert self.tree.match(request.salt, key_of(request.tokens), 99) == len(found)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


def begin(tree: RadixTree, tokens: list[int], salt: str | None = None) -> Node:
    """A locked handle at the end of what is cached of some tokens."""
    root = tree.root(salt)
    tree.lock(root)
    return tree.extend(root, key_of(tokens), 0, len(tokens)).handle


def add(tree: RadixTree, tokens: list[int], pages: list[int], salt: str | None = None) -> list[int]:
    """Run a request from its begin to its end; its pages that the tree did not take."""
    handle = begin(tree, tokens, salt)
    return tree.merge(handle, key_of(tokens), handle.end, pages[handle.end :])


def drawing(node: Node) -> Any:
    """A subtree as (pages, locks, [children])."""
    return (node.pages, node.locks, [drawing(child) for child in node.children.values()])


def test_split_keeps_handles() -> None:
    tree = RadixTree(1)
    deep = tree.insert(begin(tree, [1, 2, 3, 4, 5]), key_of([1, 2, 3, 4, 5]), 0, [10, 11, 12, 13])
    tree.lock(deep)
    deepest = tree.insert(deep, key_of([1, 2, 3, 4, 5]), 4, [14])
    assert drawing(tree.root(None)) == ([], 2, [([10, 11, 12, 13], 2, [([14], 1, [])])])

    upper = begin(tree, [1, 2, 9])
    expected: Any = ([10, 11], 3, [([12, 13], 2, [([14], 1, [])])])
    assert drawing(tree.root(None)) == ([], 3, [expected])
    assert (upper.pages, upper.end) == ([10, 11], 2)
    assert (deep.pages, deep.end, deepest.parent) == ([12, 13], 4, deep)
    tree.check_integrity([deep, deepest, upper])


def test_split_at_the_limit() -> None:
    tree = RadixTree(1)
    add(tree, [1, 2, 3], [10, 11, 12])
    root = tree.root(None)
    tree.lock(root)
    handle, pages = tree.extend(root, key_of([1, 2, 3]), 0, 2)
    assert (handle.pages, pages, tree.num_unlocked_pages) == ([10, 11], [10, 11], 1)
    assert tree.evict(9) == [12]


def test_insert_appends_in_place_only_for_a_sole_holder() -> None:
    tree, key = RadixTree(2), key_of([1, 1, 2, 2, 3, 3, 4, 4])
    root = tree.root(None)
    tree.lock(root)
    first = tree.insert(root, key, 0, [10])
    assert first is not root
    assert tree.insert(first, key, 1, [11]) is first
    tree.lock(first)
    child = tree.insert(first, key, 2, [12])
    assert child is not first
    assert tree.insert(child, key, 3, [13]) is child
    assert drawing(root) == ([], 2, [([10, 11], 2, [([12, 13], 1, [])])])
    tree.check_integrity([first, child])


def test_merge_returns_duplicates_and_keeps_the_rest() -> None:
    tree, key = RadixTree(1), key_of([1, 2, 3, 4])
    root = tree.root(None)
    tree.lock(root)
    assert add(tree, [1, 2, 9], [10, 11, 12]) == []
    assert tree.merge(root, key, 0, [20, 21, 22, 23]) == [20, 21]
    assert drawing(tree.root(None)) == ([], 0, [([10, 11], 0, [([12], 0, []), ([22, 23], 0, [])])])
    assert tree.num_unlocked_pages == 5


def test_salts_share_nothing_and_leave_nothing() -> None:
    tree = RadixTree(1)
    for i in range(100):
        assert tree.match(f"s{i}", key_of([1, 2]), 2) == 0
        assert add(tree, [1, 2], [2 * i, 2 * i + 1], salt=f"s{i}") == []
        assert tree.match(f"s{i}", key_of([1, 2]), 2) == 2
    assert tree.num_nodes == 200
    assert sorted(tree.evict(1000)) == list(range(200))
    add(tree, [1], [], salt="nothing kept")
    tree.unlock(begin(tree, [1], salt="nothing cached"))
    assert (tree.num_nodes, tree._roots, tree._heap) == (0, {}, [])


def test_evict_takes_the_least_recently_used_first() -> None:
    tree = RadixTree(1)
    for token in range(4):
        add(tree, [token, 7], [2 * token, 2 * token + 1])
    assert tree.evict(2) == [0, 1]
    add(tree, [1, 7], [])  # touched: it moves to the end
    assert tree.evict(4) == [4, 5, 6, 7]
    assert tree.match(None, key_of([1, 7]), 2) == 2


def test_evict_trims_the_tail() -> None:
    tree = RadixTree(2)
    add(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    assert tree.evict(2) == [11, 12]
    tree.check_integrity()
    assert tree.match(None, key_of([1, 1, 2, 2, 3, 3]), 3) == 1
    assert tree.evict(2) == [10]
    assert tree.evict(2) == []


def test_a_parent_can_be_evicted_after_its_child() -> None:
    tree = RadixTree(1)
    add(tree, [1, 2], [10, 11])
    add(tree, [1, 3], [10, 12])
    add(tree, [5], [13])
    handle = begin(tree, [1, 3])
    assert tree.evict(1) == [11]
    assert tree.evict(9) == [13]
    tree.unlock(handle)
    assert tree.evict(1) == [12]
    assert tree.evict(1) == [10]


def test_match_changes_nothing() -> None:
    tree = RadixTree(1)
    add(tree, [1, 2, 3], [10, 11, 12])
    before = (drawing(tree.root(None)), tree.num_nodes, list(tree._heap), tree._tick)
    assert tree.match(None, key_of([1, 2, 9]), 3) == 2
    assert tree.match(None, key_of([1, 2, 3]), 1) == 1
    assert tree.match("new salt", key_of([1, 2, 3]), 3) == 0
    assert (drawing(tree.root(None)), tree.num_nodes, list(tree._heap), tree._tick) == before
    assert tree._roots.keys() == {None}


def test_uses_do_not_pile_up() -> None:
    tree = RadixTree(1)
    for _ in range(1000):
        add(tree, [1, 2], [10, 11])
    assert len(tree._heap) <= 2 * tree.num_nodes + 64
    tree.check_integrity()


def lines_run(call: Callable[[], Any]) -> int:
    """How many lines of the tree's code a call runs: its work, whatever the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == radix_tree.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_work_of_evict_does_not_depend_on_the_size_of_the_tree() -> None:
    work = []
    for sequences in (10, 5000):
        tree = RadixTree(1)
        for i in range(sequences):
            add(tree, [7, i, 7], [3 * i, 3 * i + 1, 3 * i + 2])
        work.append(lines_run(lambda tree=tree: tree.evict(9)))  # type: ignore[misc]
    assert 0 < work[0] == work[1] < 300


def test_misuse_is_refused() -> None:
    tree, key = RadixTree(2), key_of([1, 1, 2, 2])
    root = tree.root(None)
    for call in (tree.unlock, lambda node: tree.extend(node, key, 0, 2)):
        with pytest.raises(RuntimeError, match="nobody has locked it"):
            call(root)
    tree.lock(root)
    with pytest.raises(RuntimeError, match="ends at page 0, not at page 1"):
        tree.insert(root, key, 1, [10])
    with pytest.raises(RuntimeError, match="3 pages of 2 tokens, but 4 tokens"):
        tree.merge(root, key, 0, [10, 11, 12])
    tree.check_integrity([root])
    node = tree.insert(root, key, 0, [10])
    tree.unlock(node)
    assert tree.evict(1) == [10]
    for gone in (node, root):
        with pytest.raises(RuntimeError, match="no longer in the tree"):
            tree.lock(gone)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda t, upper, held, leaf: setattr(t, "num_nodes", 9), "unlocked pages are"),
        (lambda t, upper, held, leaf: setattr(t, "num_pages", 9), "unlocked pages are"),
        (lambda t, upper, held, leaf: setattr(t, "num_unlocked_pages", 9), "unlocked pages are"),
        (lambda t, upper, held, leaf: setattr(held, "locks", 2), "should have 1 locks"),
        (lambda t, upper, held, leaf: setattr(upper, "locks", 0), "should have 1 locks"),
        (lambda t, upper, held, leaf: setattr(leaf, "parent", t.root(None)), "its parent looks"),
        (lambda t, upper, held, leaf: setattr(leaf, "parent", None), "is not the root of its salt"),
        (lambda t, upper, held, leaf: setattr(leaf, "salt", "x"), "its parent's salt"),
        (lambda t, upper, held, leaf: setattr(leaf, "end", 7), "should end at page 4"),
        (lambda t, upper, held, leaf: setattr(leaf, "last_use", 99), "later than its parent"),
        (lambda t, upper, held, leaf: leaf.key.reverse(), "its parent looks"),
        (lambda t, upper, held, leaf: leaf.key.pop(), "bytes of key"),
        (lambda t, upper, held, leaf: leaf.pages.pop(), "bytes of key"),
        (lambda t, upper, held, leaf: leaf.pages.clear(), "has no pages"),
        (lambda t, upper, held, leaf: leaf.pages.__setitem__(0, 10), "in the tree twice"),
        (lambda t, upper, held, leaf: upper.children.clear(), "is held, but not in the tree"),
        (lambda t, upper, held, leaf: t._heap.pop(0), "each unlocked leaf once"),
        (lambda t, upper, held, leaf: t._heap.append(t._heap[0]), "each unlocked leaf once"),
        (lambda t, upper, held, leaf: t._heap.reverse(), "out of order"),
        (lambda t, upper, held, leaf: t.root("unused"), "a root that nothing needs"),
    ],
)
def test_check_integrity_finds(corrupt: Callable[..., Any], message: str) -> None:
    tree = RadixTree(1)
    add(tree, [1, 2, 3, 4], [10, 11, 12, 13])
    add(tree, [1, 2, 5], [10, 11, 14])
    add(tree, [6], [15])
    held = begin(tree, [1, 2, 5])
    upper = held.parent
    assert upper is not None
    leaf = next(node for node in upper.children.values() if node is not held)
    tree.check_integrity([held])
    with pytest.raises(RuntimeError, match="should have 0 locks"):
        tree.check_integrity([])
    corrupt(tree, upper, held, leaf)
    with pytest.raises(RuntimeError, match=message):
        tree.check_integrity([held])
