"""Random paged pools of keys and values, and attention over them as its definition has it.

For the tests of the attention kernels. What no token owns is NaN: the rest of a request's last
page, the pages of nobody, and the page that the unused part of the page table names. A kernel that
lets one of them into a result shows it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Paged", "make_paged", "reference_attention"]


class Paged(NamedTuple):
    """Keys and values of B requests, in pages in random order."""

    k_pages: torch.Tensor
    """`[P, page_size, Hk, D]`, one layer of a pool that has more."""
    v_pages: torch.Tensor
    page_table: torch.Tensor
    """`[rows, max_pages]` int32, with more rows than requests."""
    rows: torch.Tensor
    """`[B]` int32: each request's row of the page table, in no order."""
    seq_lens: torch.Tensor
    """`[B]` int32."""


def make_paged(
    seq_lens: list[int],
    *,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Paged:
    """A pool that holds `seq_lens[b]` tokens (0 is allowed) of each request b.

    The random numbers are drawn on the CPU in float32, so they are the same on each device and,
    but for rounding, in each dtype.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=random)
    rows = torch.randperm(len(seq_lens) + 2, generator=random)[: len(seq_lens)].int()
    # All of the table names a page of nobody, but for what is filled in below.
    page_table = order[-1].int().repeat(len(seq_lens) + 2, max(counts) + 2)
    pool = torch.full((2, 3, num_pages * page_size, num_kv_heads, head_dim), torch.nan)
    first = 0
    for row, length, count in zip(rows.tolist(), seq_lens, counts, strict=True):
        pages = order[first : first + count]
        page_table[row, :count] = pages.int()
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        pool[:, 1, slots] = torch.randn(2, length, num_kv_heads, head_dim, generator=random)
        first += count
    k_pages, v_pages = pool.to(device, dtype)[:, 1].unflatten(1, (num_pages, page_size))
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Paged(k_pages, v_pages, page_table.to(device), rows.to(device), lengths)


def reference_attention(
    q: torch.Tensor,
    paged: Paged,
    lengths: list[int] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the requests' last tokens, in float64: `[T, Hq, D]` on q's device.

    `q [T, Hq, D]` holds `lengths[b]` tokens of each request b, one after the other; None means
    one token each, which is decode. Token i of them sits at position `seq_lens[b] - lengths[b] + i`
    and sees the keys up to its own, with a window only the last `window` of these.
    """
    k_pages, v_pages, page_table, rows, seq_lens = (tensor.cpu() for tensor in paged)
    page_size, num_kv_heads = k_pages.shape[1:3]
    out = []
    parts = q.cpu().double().split(lengths or [1] * len(rows))
    for part, row, seq_len in zip(parts, rows.tolist(), seq_lens.tolist(), strict=True):
        keys = torch.arange(seq_len)
        slots = page_table[row, keys // page_size].long() * page_size + keys % page_size
        k = k_pages.flatten(0, 1)[slots].double()  # [seq_len, Hk, D]
        v = v_pages.flatten(0, 1)[slots].double()
        grouped = part.unflatten(1, (num_kv_heads, -1))  # [n, Hk, G, D]
        scores = torch.einsum("nhgd,khd->nhgk", grouped, k) * scale
        positions = torch.arange(seq_len - len(part), seq_len)[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
        out.append(torch.einsum("nhgk,khd->nhgd", scores.softmax(-1), v).flatten(1, 2))
    return torch.cat(out).to(q.device)
