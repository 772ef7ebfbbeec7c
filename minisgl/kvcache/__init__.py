"""The paged memory of keys and values, and who owns which page.

Owns: the pool tensor (`pool.py`), the free list (`allocator.py`), the caches that hand pages to
requests (`base.py`; `naive.py` shares nothing, `radix.py` shares prefixes by `radix_tree.py`).
Does not own: which requests run (`scheduler/`), or how attention reads pages (`attention/`).

    pages of the pool   | 0 ................................. num_pages - 1 | dummy |
    each is owned by      exactly one of: a request, the tree, the free list   nobody

Invariant: free + cached + in use = all pages, after every step.
Read next: `radix.py`, then `minisgl/attention/`.
"""

from __future__ import annotations

from .allocator import PageAllocator
from .base import KVCache
from .naive import NaiveCache
from .pool import KVPool, KVShape
from .radix import RadixCache

__all__ = ["CACHES", "KVCache", "KVPool", "KVShape", "NaiveCache", "PageAllocator", "RadixCache"]

CACHES: dict[str, type[KVCache]] = {"radix": RadixCache, "naive": NaiveCache}
"""By the names of `--cache`; each takes the number of pages and their size in tokens."""
