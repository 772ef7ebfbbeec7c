"""The data structure of the prefix cache: which pages hold the tokens of which prefix.

There is one tree per salt. A node owns some consecutive pages and the tokens in them; the nodes
from the root to it spell a prefix. Here with pages of one token; p0 is a page's number:

    root ── [the quick | p0 p1] ─┬─ [brown fox | p2 p3]     "the quick brown fox"
                                 └─ [red | p7]              "the quick red"

A request holds a *handle*: a node on which it has one lock, and which stands for all tokens from
the root to the END of the node. What the request's pages up to there hold is in the tree, what
comes later is its own:

    tokens of a request   | 0 ............. handle.end * page_size | .............. |
    their pages belong to   the tree, locked for the request         the request

Invariants, after every call:
- A lock on a node is also on all its ancestors: `locks` counts the handles at the node or below.
  Hence the unlocked nodes are whole subtrees, and all their pages can be evicted, leaves first.
- A parent's `last_use` is not below its children's: evicting the oldest leaf is evicting the
  oldest node. Only `unlock` sets it, since the age of what is locked makes no difference.
- Children differ in their first page, by which their parent finds them.
- `_heap` has exactly one entry that isn't stale for each unlocked leaf, and none for other nodes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Extension", "Found", "Node", "RadixTree"]

Key = bytes | bytearray  # token ids as native int32
TOKEN_BYTES = 4


class Node:
    """Consecutive pages of a prefix, and the tokens in them; a root has none.

    `key` is the node's own copy of its tokens, `end` the number of pages from the root to its
    end. Children are found by the bytes of their first page.
    """

    __slots__ = ("children", "end", "key", "last_use", "locks", "pages", "parent", "salt")

    def __init__(self, salt: str | None, parent: Node | None, key: Key, pages: list[int]) -> None:
        self.salt = salt
        self.parent = parent
        self.key = bytearray(key)
        self.pages = pages
        self.end: int = (parent.end if parent else 0) + len(pages)
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_use = 0

    def __repr__(self) -> str:
        start = self.end - len(self.pages)
        return f"<pages {start}..{self.end}, {self.locks} locks, {len(self.children)} children>"

    def upwards(self) -> Iterator[Node]:
        """The node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Extension(NamedTuple):
    """Where `extend` has moved the caller's lock, and the pages on the way there."""

    handle: Node
    pages: list[int]


class Found(NamedTuple):
    """How much of a key the tree has."""

    end: int
    """Pages of the key."""
    num_unlocked_pages: int
    """Pages of these that no handle protects."""
    node: Node | None
    """Where they end, unless that is inside a node."""


class _Walk(NamedTuple):
    """The nodes along a key, and the page of the key where they stop being alike."""

    path: list[Node]
    end: int


class RadixTree:
    """Prefixes and their pages; knows nothing of requests or free pages.

    A `key` is the tokens from the sequence's first on and may be longer than
    what a call uses of it. Positions and limits are in pages; a trailing partial page is ignored.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_unlocked_pages = 0  # those that `evict` could return, all of them
        self.num_nodes = 0  # with the roots
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str | None, Node] = {}
        self._tick = 0  # counts unlocks
        # Unlocked leaves as (last_use, sequence, node): see `_is_stale`.
        self._heap: list[tuple[int, int, Node]] = []
        self._sequence = 0

    def root(self, salt: str | None) -> Node:
        """The handle of no tokens, to be locked at once; made if the salt is new."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(salt, None, b"", [])
            self.num_nodes += 1
        return root

    def find(self, salt: str | None, key: Key, limit: int) -> Found:
        """How many of the key's first `limit` pages are here. Changes nothing at all."""
        root = self._roots.get(salt)
        if root is None:
            return Found(0, 0, None)
        path, end = self._walk(root, key, 0, limit)
        unlocked = sum(len(node.pages) for node in path if not node.locks)
        last = path[-1] if path else root
        if last.end == end:
            return Found(end, unlocked, last)
        return Found(end, unlocked - (last.end - end if not last.locks else 0), None)

    def has_child(self, handle: Node, key: Key, start: int) -> bool:
        """Whether the tree has the key's page `start`, at which the handle ends."""
        return self._page(key, start) in handle.children

    def lock(self, node: Node) -> None:
        """Make the node a handle: it and all before it stay until `unlock` or `merge`."""
        path = list(node.upwards())
        if self._roots.get(node.salt) is not path[-1]:
            raise RuntimeError(f"{node} is no longer in the tree")
        for above in path:
            self._add_lock(above)

    def unlock(self, handle: Node) -> None:
        """Give the caller's lock back; the handle and all before it are the last used now."""
        self._check_arguments(handle, b"", handle.end, 0)
        self._tick += 1
        for node in handle.upwards():
            node.last_use = self._tick
            node.locks -= 1
            if not node.locks:
                self.num_unlocked_pages += len(node.pages)
        self._settle(handle)

    def extend(self, handle: Node, key: Key, start: int, limit: int) -> Extension:
        """Move the caller's lock from page `start`, where the handle ends, as deep as key goes.

        It goes no deeper than `limit`; where that, or the end of what matches, is inside a node,
        the node is split. With nothing found, the handle stays what it is.
        """
        self._check_arguments(handle, key, start, start)
        path, end = self._walk(handle, key, start, limit)
        pages: list[int] = []
        if path and end < path[-1].end:
            path[-1] = self._split(path[-1], len(path[-1].pages) - (path[-1].end - end))
        for node in path:  # all above has the caller's lock already
            self._add_lock(node)
            pages += node.pages
            handle = node
        return Extension(handle, pages)

    def insert(self, handle: Node, key: Key, start: int, pages: Sequence[int]) -> Node:
        """Take over pages that hold the key's tokens from page `start` on; the new handle.

        The handle ends at `start` and has no child that begins with the first of the pages. A
        leaf that only the caller has locked grows in place, so that a sequence which is published
        page by page is one node; otherwise the pages become a child:

            [a b | p0 p1] locks 1   + c   ->   [a b c | p0 p1 p2] locks 1
            [a b | p0 p1] locks 2   + c   ->   [a b | p0 p1] locks 2 ── [c | p2] locks 1
        """
        self._check_arguments(handle, key, start, start + len(pages))
        if not pages:
            return handle
        first = self._page(key, start)
        if first in handle.children:
            raise RuntimeError(f"Page {start} of the key is in the tree already, after {handle}")
        self.num_pages += len(pages)
        tokens = key[start * self._page_bytes : (start + len(pages)) * self._page_bytes]
        if handle.parent is not None and handle.locks == 1 and not handle.children:
            handle.key += tokens
            handle.pages += pages
            handle.end += len(pages)
            return handle
        child = Node(handle.salt, handle, tokens, list(pages))
        child.locks = 1
        handle.children[first] = child
        self.num_nodes += 1
        return child

    def merge(self, handle: Node, key: Key, start: int, pages: Sequence[int]) -> list[int]:
        """Take over pages as `insert` does, but for those whose tokens are here; then unlock.

        Returned are the caller's pages that the tree had no use for, to be freed:

            handle ── [c d | p2 p3]    merge of c d e f in p5 p6 p7 p8 returns p5 p6
                   ── [c d e f | p2 p3 p7 p8]
        """
        self._check_arguments(handle, key, start, start + len(pages))
        handle, found = self.extend(handle, key, start, start + len(pages))
        known = len(found)
        self.unlock(self.insert(handle, key, start + known, pages[known:]))
        return list(pages[:known])

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` pages that are unlocked, the least recently used sequences first.

        Of the last leaf only as much of its tail goes as is needed. The work is proportional to
        what is evicted (and to the unlocks before, each of which left at most one stale entry).
        """
        evicted: list[int] = []
        while self._heap and len(evicted) < count:
            if self._is_stale(self._heap[0]):
                heapq.heappop(self._heap)
                continue
            node = self._heap[0][2]
            surplus = len(node.pages) - (count - len(evicted))
            if surplus > 0:  # the leaf stays, and its entry in the heap
                evicted += node.pages[surplus:]
                node.end -= len(node.pages) - surplus
                del node.pages[surplus:], node.key[surplus * self._page_bytes :]
            else:
                heapq.heappop(self._heap)
                evicted += node.pages
                self._remove(node)
        self.num_pages -= len(evicted)
        self.num_unlocked_pages -= len(evicted)
        return evicted

    def pages(self) -> Iterator[int]:
        """All pages in the tree."""
        for node in self._nodes():
            yield from node.pages

    def check_integrity(self, locks: Iterable[Node] = ()) -> None:
        """Raise unless every invariant holds, and `locks` are all handles that are held."""
        nodes = list(self._nodes())
        held = Counter(above for handle in locks for above in handle.upwards())
        faults = [fault for node in nodes for fault in self._node_faults(node, held[node])]
        faults += [f"{node} is held, but not in the tree" for node in held.keys() - set(nodes)]
        faults += self._total_faults(nodes)
        if faults:
            raise RuntimeError("Radix tree: " + "; ".join(faults[:5]))

    def _page(self, key: Key, page: int) -> bytes:
        """The bytes of one page of a key: short, and so no child's, past its last whole page."""
        return bytes(key[page * self._page_bytes : (page + 1) * self._page_bytes])

    def _check_arguments(self, handle: Node, key: Key, start: int, end: int) -> None:
        if not handle.locks:
            raise RuntimeError(f"{handle} is no handle: nobody has locked it")
        if handle.end != start:
            raise RuntimeError(f"{handle} ends at page {handle.end}, not at page {start}")
        if len(key) < end * self._page_bytes:
            tokens = len(key) // TOKEN_BYTES
            raise RuntimeError(f"{end} pages of {self.page_size} tokens, but {tokens} tokens")

    def _walk(self, node: Node, key: Key, start: int, limit: int) -> _Walk:
        """Follow the key's pages `start .. limit` down from a node that ends at `start`.

        Before each round, all up to `position` is alike, and `node` ends there.
        """
        size = self._page_bytes
        path: list[Node] = []
        position, stop = start * size, min(limit * size, len(key))
        while position < stop:
            child = node.children.get(bytes(key[position : position + size]))
            if child is None:
                break
            path.append(child)
            after = position + len(child.key)
            if after > stop or not key.startswith(child.key, position):
                alike = _common_tokens(child.key, key, position, min(after, stop))
                return _Walk(path, position // size + alike // self.page_size)
            position, node = after, child
        return _Walk(path, position // size)

    def _split(self, node: Node, count: int) -> Node:
        """Put the node's first `count` pages into a new node above it, which is returned.

        Here 2 of 5 pages, the node N having one handle at itself and one at its child C:

            before   parent ── N [a b c d e | p0 p1 p2 p3 p4] locks 2 ── C locks 1

            after    parent ── U [a b | p0 p1] locks 2 ── N [c d e | p2 p3 p4] locks 2 ── C locks 1

        N keeps its identity, its end and its children, so every handle stands for the same tokens
        as before. All handles below U are below N yet: U has as many locks, and is as old. A leaf
        N stays a leaf, of the same age: its entry in the heap remains right.
        """
        parent = node.parent
        assert parent is not None, "a root has no pages to split"
        size = count * self._page_bytes
        upper = Node(node.salt, parent, node.key[:size], node.pages[:count])
        upper.locks, upper.last_use = node.locks, node.last_use
        parent.children[self._page(node.key, 0)] = upper
        upper.children[self._page(node.key, count)] = node
        node.parent, node.key, node.pages = upper, node.key[size:], node.pages[count:]
        self.num_nodes += 1
        return upper

    def _add_lock(self, node: Node) -> None:
        if not node.locks:
            self.num_unlocked_pages -= len(node.pages)
        node.locks += 1

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "roots are not in the heap"
        del parent.children[self._page(leaf.key, 0)]
        leaf.parent = None
        self.num_nodes -= 1
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """What follows when a node loses a lock or a child: it may be an unlocked leaf now."""
        if node.locks or node.children:
            return
        if node.parent is None:  # so that salts that are gone leave nothing behind
            del self._roots[node.salt]
            self.num_nodes -= 1
            return
        self._sequence += 1
        heapq.heappush(self._heap, (node.last_use, self._sequence, node))
        if len(self._heap) > 2 * self.num_nodes + 64:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)

    def _is_stale(self, entry: tuple[int, int, Node]) -> bool:
        """Whether an entry's node has been locked since.

        Nothing else needs a look: a leaf gets children only while it is locked, and the unlock
        then changes its `last_use`. A removed node has no entries: its stale ones were older than
        the one that led to its removal, and left the heap before.
        """
        last_use, _, node = entry
        return node.locks > 0 or node.last_use != last_use

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _node_faults(self, node: Node, locks: int) -> list[str]:
        """What is wrong with a node, at which or below which `locks` handles are held."""
        parent, size = node.parent, len(node.pages)
        end = (parent.end if parent else 0) + size
        faults = {
            f"has {len(node.key)} bytes of key": len(node.key) != size * self._page_bytes,
            f"should end at page {end}": node.end != end,
            f"should have {locks} locks": node.locks != locks,
        }
        if parent is None:
            faults |= {
                "is not the root of its salt": self._roots.get(node.salt) is not node or size > 0,
                "is a root that nothing needs": not node.locks and not node.children,
            }
        else:
            found = parent.children.get(self._page(node.key, 0))
            faults |= {
                "has no pages": not node.pages,
                "is not where its parent looks for it": found is not node,
                "has not its parent's salt": node.salt != parent.salt,
                "was used later than its parent": node.last_use > parent.last_use,
            }
        return [f"{node} {fault}" for fault, is_so in faults.items() if is_so]

    def _total_faults(self, nodes: list[Node]) -> list[str]:
        """What is wrong with the sums over all nodes and with the order of eviction."""
        pages = [page for node in nodes for page in node.pages]
        counted = (len(nodes), len(pages), sum(len(n.pages) for n in nodes if not n.locks))
        kept = (self.num_nodes, self.num_pages, self.num_unlocked_pages)
        leaves = Counter(n for n in nodes if n.parent and not n.locks and not n.children)
        heap = self._heap
        valid = Counter(entry[2] for entry in heap if not self._is_stale(entry))
        faults = {
            f"nodes, pages and unlocked pages are {counted}, not {kept}": counted != kept,
            "a page is in the tree twice": len(set(pages)) != len(pages),
            "the heap has not each unlocked leaf once": valid != leaves,
            "the heap is out of order": any(
                e < heap[(i - 1) // 2] for i, e in enumerate(heap) if i
            ),
        }
        return [fault for fault, is_so in faults.items() if is_so]


def _common_tokens(ours: bytearray, key: Key, start: int, stop: int) -> int:
    """How many tokens `ours` and the bytes `start .. stop` of the key have alike at their start."""
    count = (stop - start) // TOKEN_BYTES
    unlike = np.frombuffer(ours, np.int32, count) != np.frombuffer(key, np.int32, count, start)
    first = int(unlike.argmax())
    return first if unlike[first] else count
