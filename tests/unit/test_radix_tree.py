"""The tree of prefixes, by example; see `test_radix_tree_random.py` for all the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minisgl.kvcache import radix_tree
from minisgl.kvcache.radix_tree import Node, RadixTree
from tests.unit.radix_keys import key_of


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
        assert tree.find(f"s{i}", key_of([1, 2]), 2).end == 0
        assert add(tree, [1, 2], [2 * i, 2 * i + 1], salt=f"s{i}") == []
        assert tree.find(f"s{i}", key_of([1, 2]), 2).end == 2
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
    assert tree.find(None, key_of([1, 7]), 2).end == 2


def test_evict_trims_the_tail() -> None:
    tree = RadixTree(2)
    add(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    assert tree.evict(2) == [11, 12]
    tree.check_integrity()
    assert tree.find(None, key_of([1, 1, 2, 2, 3, 3]), 3).end == 1
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
    assert tree.find(None, key_of([1, 2, 9]), 3).end == 2
    assert tree.find(None, key_of([1, 2, 3]), 1).end == 1
    assert tree.find("new salt", key_of([1, 2, 3]), 3).end == 0
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
