"""Chapter 4, the KV cache: a pool of pages, and who owns which.

    python examples/ch04_kvcache.py tests/configs/qwen3-0.6b.json

CONFIG is a `config.json` or the folder that holds one. Adds `kvcache`: the pool, the free list
and the caches, of which this takes the one that shares nothing (chapter 8 has the other). It
needs no weights: random keys and values will do.

Prints what a token and a page cost, then follows two requests that grow page by page, the slots
where their tokens lie, a request that gets no page because none is free, and the pages coming
back. After each change the integrity check asks that every page has exactly one owner.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig

from minisgl.core import Req, SamplingParams
from minisgl.kernel import store_kv
from minisgl.kvcache import KVPool, NaiveCache
from minisgl.kvcache.pool import KVShape
from minisgl.models import ModelConfig

PAGE_SIZE, NUM_PAGES = 4, 5
DTYPE = torch.bfloat16


def request(uid: int, length: int) -> Req:
    """A request whose prompt is `length` tokens of no meaning."""
    return Req(uid, list(range(length)), length, SamplingParams(), max_len=64)


def slots(req: Req, length: int) -> torch.Tensor:
    """Where the request's tokens `[0, length)` lie in the pool."""
    return torch.tensor(
        [req.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(length)]
    )


def main() -> None:
    """Grow two requests until the pages run out, then end one."""
    parser = argparse.ArgumentParser(description="Pages of keys and values.")
    parser.add_argument("config", help="a config.json, or the folder that holds one")
    config = ModelConfig.from_hf(AutoConfig.from_pretrained(parser.parse_args().config))
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE)
    pool = KVPool(shape, NUM_PAGES, DTYPE, torch.device("cpu"))
    print(f"one token: {config.kv_bytes_per_token(DTYPE):,} bytes")
    print(f"one page of {PAGE_SIZE} tokens: {shape.page_bytes(DTYPE):,} bytes")
    print(f"pool (k and v, layers, pages + dummy, page, heads, size): {tuple(pool.data.shape)}\n")

    cache = NaiveCache(NUM_PAGES, PAGE_SIZE)
    running = [first, second] = [request(0, 6), request(1, 3)]

    def grow(req: Req, length: int) -> None:
        pages = cache.grow(req, length)
        cache.check_integrity(running)
        got = "no page is free for it" if pages is None else f"new pages {pages}"
        print(f"request {req.uid} to {length:>2} tokens: {got}; {cache.num_available_pages} free")

    grow(first, 6)  # two pages, the second half full
    grow(second, 3)
    grow(first, 8)  # fits into the pages it has
    grow(first, 9)  # one token more does not
    grow(second, 5)
    print(f"request 0 holds pages {first.pages}, its tokens lie in {slots(first, 9).tolist()}")
    grow(second, 9)  # the scheduler would now retract a request
    print(f"request 0 could grow to {cache.room_for(first)} tokens\n")

    keys, values = torch.randn(2, 9, config.num_kv_heads, config.head_dim).to(DTYPE)
    store_kv(*pool.slots(0), keys, values, slots(first, 9))
    by_page = pool.pages(0)[0][first.pages].flatten(0, 1)[:9]  # the same memory, seen by page
    print("keys read back by page are those stored by slot:", torch.equal(by_page, keys))

    cache.end(first)
    running.remove(first)
    cache.check_integrity(running)
    print(f"request 0 ended: {cache.num_available_pages} of {cache.num_pages} pages free")
    grow(second, 9)


if __name__ == "__main__":
    main()
