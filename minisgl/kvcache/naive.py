"""A cache that shares nothing: each request's pages are its own."""

from __future__ import annotations

from .base import KVCache

__all__ = ["NaiveCache"]


class NaiveCache(KVCache):
    """Every request computes all of its tokens; its pages are free as soon as it ends."""
