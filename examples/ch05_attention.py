"""Chapter 5, attention over pages: a mixed batch gives what plain attention gives.

    python examples/ch05_attention.py tests/configs/qwen3-0.6b.json

CONFIG is a `config.json` or the folder that holds one; heads and head size come from it. Adds
`attention`: the backend that stores keys and values in the pool and attends over its pages.

Request A's prompt is computed whole, then A decodes while request B's prompt is computed in two
chunks beside it. Queries, keys and values are random. Prints each batch, and the largest
difference of all its outputs from full causal attention in float64 (about 1e-6, the rounding of
float32): paging, chunking and batching change nothing.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig

from minisgl.attention import TorchBackend
from minisgl.core import Batch, Req, SamplingParams
from minisgl.kvcache import KVPool, NaiveCache
from minisgl.kvcache.pool import KVShape
from minisgl.models import ModelConfig

PAGE_SIZE, NUM_PAGES, LENGTH = 4, 16, 24
# What each batch computes: (request, tokens of it).
STEPS = [[("A", 11)], [("A", 1), ("B", 6)], [("A", 1), ("B", 4)], [("A", 1), ("B", 1)]]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a whole sequence: `q [L, Hq, D]`, `k, v [L, Hk, D]` to `[L, Hq, D]`."""
    group = q.shape[1] // k.shape[1]  # each KV head serves so many query heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def main() -> None:
    """Run the batches and compare each with full attention."""
    parser = argparse.ArgumentParser(description="A mixed batch through the paged attention.")
    parser.add_argument("config", help="a config.json, or the folder that holds one")
    config = ModelConfig.from_hf(AutoConfig.from_pretrained(parser.parse_args().config))
    heads, kv_heads, size = config.num_qo_heads, config.num_kv_heads, config.head_dim
    torch.manual_seed(0)

    pool = KVPool(KVShape(1, kv_heads, size, PAGE_SIZE), NUM_PAGES, torch.float32,
                  torch.device("cpu"))  # fmt: skip
    cache = NaiveCache(NUM_PAGES, PAGE_SIZE)
    page_table = torch.full((2, NUM_PAGES), pool.dummy_page, dtype=torch.int32)
    backend = TorchBackend(pool, page_table, windows=[None])  # one layer, no sliding window

    reqs, inputs, expected = {}, {}, {}
    for row, name in enumerate("AB"):
        reqs[name] = Req(row, [0] * LENGTH, LENGTH, SamplingParams(), max_len=LENGTH, row=row)
        inputs[name] = [torch.randn(LENGTH, n, size) for n in (heads, kv_heads, kv_heads)]
        expected[name] = full_attention(*(x.double() for x in inputs[name]))

    for step in STEPS:
        spans, locations = [], []
        for name, count in step:
            req = reqs[name]
            req.device_len = req.cached_len + count
            cache.grow(req, req.device_len)
            page_table[req.row, : len(req.pages)] = torch.tensor(req.pages)
            positions = torch.arange(req.cached_len, req.device_len)
            pages = page_table[req.row, positions // PAGE_SIZE]
            locations.append(pages * PAGE_SIZE + positions % PAGE_SIZE)
            spans.append((name, slice(req.cached_len, req.device_len)))
        batch = Batch([reqs[name] for name, _ in step])
        batch.out_loc = torch.cat(locations)
        batch.attn_metadata = backend.prepare_metadata(batch)
        q, k, v = (torch.cat([inputs[name][i][span] for name, span in spans]) for i in range(3))
        out = backend.forward(q, k, v, 0, batch)

        wanted = torch.cat([expected[name][span] for name, span in spans])
        error = (out - wanted).abs().max().item()
        shown = ", ".join(f"{name}[{s.start}:{s.stop}]" for name, s in spans)
        print(f"batch of {batch.num_tokens:>2} tokens, {shown:<20} max error: {error:.1e}")
        for req in batch.reqs:
            req.cached_len = req.device_len


if __name__ == "__main__":
    main()
