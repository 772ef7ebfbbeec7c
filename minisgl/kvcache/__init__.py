"""The paged memory of keys and values, and who owns which page.

Owns: the pool tensor (`pool.py`), the free list (`allocator.py`) and the caches that hand
pages to requests (`naive.py`). Does not own: which requests run (`scheduler/`), or how
attention reads pages (`attention/`).

    pages of the pool   | 0 ............................ num_pages - 1 | dummy |
    each is owned by      exactly one of: a request, the free list       nobody

Invariant: free + in use = all pages, after every step.
Read next: `minisgl/attention/`.
"""

from __future__ import annotations

from .allocator import PageAllocator
from .naive import NaiveCache
from .pool import KVPool, KVShape

__all__ = ["KVPool", "KVShape", "NaiveCache", "PageAllocator"]
