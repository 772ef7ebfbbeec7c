"""What the prefix cache takes for a request of 1,000 tokens that are cached.

    sequences of a group   | shared: 200 tokens | 800 of its own |
    a request hits           all full pages but the last token's

All go through `RadixCache` as the scheduler drives it; the sequences themselves are not kept,
but drawn again by their number, so that 10,000 of them need no more memory than the tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl.core import Req, SamplingParams
from minisgl.kvcache import RadixCache
from minisgl.utils import div_ceil

from .timing import Timer, percentiles

__all__ = ["SHARED_LEN", "bench_prefix"]

LENGTH = 1000
SHARED_LEN = 200
GROUP = 10
"""Sequences that share their first tokens."""
PROBES = 500
"""Requests measured, evenly among the cached sequences; and pages evicted, at most half of all."""
VOCAB_SIZE = 49_152


def bench_prefix(cached: int, page_size: int) -> dict[str, Any]:
    """Microseconds of the cache's calls, with so many sequences cached in a pool that is full.

    `page_size` is at most `SHARED_LEN`. First is a request whose key has to be made of its list
    of tokens, again is one that has it already. Evicting is a `grow` by one page.
    """
    params = SamplingParams(temperature=0.0).resolve_defaults({})
    cache = RadixCache(cached * div_ceil(LENGTH, page_size) + 1, page_size)
    for index in range(cached):
        _compute(cache, _request(index, params))
    rest = _hold_the_rest(cache, _newcomer(params))
    cached_pages = cache.num_cached_pages

    matched = (LENGTH - 1) // page_size * page_size
    first, again, locked = Timer(), Timer(), Timer()
    for probe in range(PROBES):
        req = _request(probe * cached // PROBES, params)
        found = [timer.run(cache.match, req).num_tokens for timer in (first, again)]
        locked.run(_begin_and_end, cache, req)
        if found != [matched, matched] or req.num_cached_tokens != matched:
            raise RuntimeError(f"of {matched} cached tokens, {found} {req.num_cached_tokens} hit")

    evicted = Timer()
    holders = [_newcomer(params) for _ in range(min(PROBES, cached_pages // 2))]
    for req in holders:
        cache.begin(req)
        if evicted.run(cache.grow, req, 1) is None:
            raise RuntimeError("No page could be evicted")
    lost = cached_pages - cache.num_cached_pages
    if lost != len(holders):
        raise RuntimeError(f"{lost} pages were evicted for {len(holders)}")
    cache.check_integrity([rest, *holders])
    return {
        "cached": cached,
        "cached_pages": cached_pages,
        "tokens": LENGTH,
        "matched_tokens": matched,
        "probes": PROBES,
        "match_first_us": percentiles(first.times_us),
        "match_again_us": percentiles(again.times_us),
        "begin_end_us": percentiles(locked.times_us),
        "evicted_pages": lost,
        "evict_page_us": percentiles(evicted.times_us),
    }


def _request(index: int, params: SamplingParams) -> Req:
    """A waiting request for the sequence of this number."""
    shared = np.random.default_rng([0, index // GROUP]).integers(0, VOCAB_SIZE, SHARED_LEN)
    own = np.random.default_rng([1, index]).integers(0, VOCAB_SIZE, LENGTH - SHARED_LEN)
    tokens = shared.tolist() + own.tolist()
    return Req(index, tokens, prompt_len=LENGTH, params=params, max_len=LENGTH + 1)


def _newcomer(params: SamplingParams) -> Req:
    """A request of which nothing is cached."""
    return Req(-1, [VOCAB_SIZE], prompt_len=1, params=params, max_len=LENGTH)


def _compute(cache: RadixCache, req: Req) -> None:
    """Take a request through its life in the cache, which keeps all its full pages."""
    cache.begin(req)
    if cache.grow(req, LENGTH) is None:
        raise RuntimeError(f"{cache.num_available_pages} pages are too few for {req}")
    req.cached_len = req.device_len = LENGTH
    cache.publish(req)
    cache.end(req)


def _hold_the_rest(cache: RadixCache, req: Req) -> Req:
    """Let a request hold all free pages, so that whoever needs one has to evict."""
    cache.begin(req)
    if cache.grow(req, cache.allocator.num_free * cache.page_size) is None:
        raise RuntimeError(f"{req} could not take the free pages")
    return req


def _begin_and_end(cache: RadixCache, req: Req) -> None:
    cache.begin(req)
    req.num_cached_tokens = req.cached_len
    cache.end(req)
