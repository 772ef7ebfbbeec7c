"""Paged attention for requests that decode: one query token each, keys in parts (flash-decoding).

A request's keys are cut into parts of equal length, so that a few long requests fill the device as
well as many short ones (Dao et al. 2023, "Flash-Decoding"). What the parts are is planned on the
device once a step, for all layers:

    seq_lens    700                          130      300                  part = 256
    items       0..256 256..512 512..700     0..130   0..256 256..300      unused: 0..0
    first_item  0                            3        4                    6

A request of one part is written at once; the others leave `(sum of p v / sum of p, log2 of the sum
of 2^score)` for each part, which a second kernel combines (leaving that to the last program of a
request was not faster). The query heads of a KV head are computed together, so that keys and values
are read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .runtime import enter, num_sms, pdl

__all__ = ["DecodeConfig", "DecodePlan", "decode_attention", "plan_decode"]

_LOG2_E = 1.4426950408889634
_MIN_PART = 64
"""Keys of the shortest part; longer ones are a multiple of it."""
_PROGRAMS_PER_SM = 24
"""Parts times KV heads for each multiprocessor: enough to balance the load, and few enough that
starting and combining them costs little (docs/log.md)."""
_COMBINED = 16
"""Parts that the combining kernel loads at once."""


class DecodePlan(NamedTuple):
    """Who reads which keys; all tensors int32 on the device, written by `plan_decode`."""

    items: torch.Tensor
    """`[max_parts + B, 8]`: the request's place in the batch, its row of the page table, the first
    key and the end of the part, whether it is the request's only one; the rest is unused. The
    columns of an item share a line of the cache."""
    first_item: torch.Tensor
    """`[B + 1]`: a request's items are `first_item[b] .. first_item[b + 1]`."""
    max_parts: int
    """The keys of all requests are cut into at most this many parts, and one more for each."""
    window: int | None

    @classmethod
    def empty(
        cls,
        max_requests: int,
        num_kv_heads: int,
        window: int | None,
        device: torch.device,
        *,
        max_parts: int | None = None,
    ) -> DecodePlan:
        """Room for the plan of a step of up to `max_requests` requests."""
        if max_parts is None:
            max_parts = triton.cdiv(_PROGRAMS_PER_SM * num_sms(device), num_kv_heads)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            ints(max_parts + max_requests, 8),
            ints(max_requests + 1),
            max_parts,
            window,
        )


class DecodeConfig(NamedTuple):
    """How `decode_attention` is compiled."""

    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 2


def plan_decode(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_decodes: torch.Tensor,
    plan: DecodePlan,
    places: int | None = None,
) -> None:
    """Cut the keys of the first `num_decodes [>= 1]` requests into parts; one small kernel.

    `rows, seq_lens [B]` int32: each request's row of the page table, and its keys, its own token
    included. `places` is the size of the attention that follows, at most B and B by default.
    """
    most = seq_lens.shape[0]
    size = most if places is None else places
    _plan_kernel[(1,)](
        rows,
        seq_lens,
        num_decodes,
        plan.items,
        plan.first_item,
        size,
        plan.max_parts,
        WINDOW=plan.window or 0,
        SIZE=triton.next_power_of_2(most),
        MIN_PART=_MIN_PART,
        num_warps=8 if most > 128 else 4,
        **pdl(seq_lens),
    )


@triton.jit(do_not_specialize=["size", "max_parts"])
def _plan_kernel(
    rows,
    seq_lens,
    num_decodes,
    items,
    first_item,
    size,
    max_parts,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    MIN_PART: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    n = tl.load(num_decodes)
    b = tl.arange(0, SIZE)
    length = tl.load(seq_lens + b, mask=b < n, other=0)
    row = tl.load(rows + b, mask=b < n, other=0)
    begin = length * 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    keys = length - begin
    part = tl.cdiv(tl.sum(keys), max_parts)
    part = tl.maximum(tl.cdiv(part, MIN_PART), 1) * MIN_PART
    parts = tl.cdiv(keys, part)
    ends = tl.cumsum(parts, 0)
    tl.store(first_item, 0)
    tl.store(first_item + 1 + b, ends, mask=b < size)  # requests that don't decode have no items
    for i in range(0, tl.max(parts, 0)):
        item = items + 8 * (ends - parts + i)
        mine = i < parts
        tl.store(item, b, mask=mine)
        tl.store(item + 1, row, mask=mine)
        tl.store(item + 2, begin + i * part, mask=mine)
        tl.store(item + 3, tl.minimum(begin + (i + 1) * part, length), mask=mine)
        tl.store(item + 4, (parts == 1).to(tl.int32), mask=mine)
    for first in range(tl.sum(parts), max_parts + size, SIZE):
        unused = first + b < max_parts + size
        tl.store(items + 8 * (first + b) + 2, 0, mask=unused)
        tl.store(items + 8 * (first + b) + 3, 0, mask=unused)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    *,
    scale: float,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of one token for each request that decodes, over its pages, into `out`.

    `q [B, Hq, D]` (rows may be strided), `k_pages, v_pages [P, page_size, Hk, D]`, `page_table
    [rows, max_pages]` int32, `out [B, Hq, D]`. How many of the B requests there are, the plan
    says; rows of the others are left as they are.

    The plan is read while the kernel launched just before this one may still run: so that one must
    not be the plan's.
    """
    size, num_heads, head_dim = out.shape
    num_kv_heads = k_pages.shape[2]
    if q.stride(1) != head_dim or q.stride(2) != 1 or not out.is_contiguous():
        raise ValueError(
            f"heads must be contiguous: q strides {q.stride()}, out strides {out.stride()}"
        )
    if plan.items.shape[0] < plan.max_parts + size:
        raise ValueError(f"{size} requests, and a plan with {plan.items.shape[0]} items")
    if not q.dtype == k_pages.dtype == v_pages.dtype == out.dtype:
        raise ValueError(f"q is {q.dtype}, keys {k_pages.dtype}, out {out.dtype}")
    if k_pages.shape != v_pages.shape or k_pages.stride() != v_pages.stride():
        raise ValueError(f"keys {tuple(k_pages.shape)} and values {tuple(v_pages.shape)} differ")
    config = config or _config(q.dtype, head_dim)
    num_items = plan.max_parts + size
    parts = torch.empty((num_items, num_heads, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((num_items, num_heads), dtype=torch.float32, device=q.device)
    head_width = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(num_items * num_kv_heads,)](
        q,
        k_pages,
        v_pages,
        page_table,
        plan.items,
        out,
        parts,
        sums,
        scale * _LOG2_E,
        q.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        page_table.stride(0),
        PAGE_SIZE=k_pages.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        HEAD_DIM=head_dim,
        HEAD_WIDTH=head_width,
        BLOCK=config.block_keys,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl(q),
    )
    _combine_kernel[(size, num_heads)](
        plan.first_item,
        parts,
        sums,
        out,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_WIDTH=head_width,
        PARTS=_COMBINED,
        num_warps=2,
        **pdl(q),
    )


def _config(dtype: torch.dtype, head_dim: int) -> DecodeConfig:
    """Measured on an H200 for bf16 and 128 (docs/log.md); others keep to less shared memory."""
    if dtype.itemsize * head_dim <= 256:
        return DecodeConfig()
    return DecodeConfig(block_keys=32, num_stages=2)


@triton.jit
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    page_table,
    items,
    out,
    parts,
    sums,
    scale,
    q_stride,
    slot_stride,
    head_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbouring programs take the heads of the same tokens, which are neighbours in memory.
    head = tl.program_id(0) % NUM_KV_HEADS
    item = tl.program_id(0) // NUM_KV_HEADS
    # The plan was made many kernels ago: what it says is loaded while this one waits.
    b = tl.load(items + 8 * item)
    row = tl.load(items + 8 * item + 1)
    start = tl.load(items + 8 * item + 2)
    end = tl.load(items + 8 * item + 3)
    alone = tl.load(items + 8 * item + 4)
    enter(PDL)
    if start >= end:
        return
    table = page_table + row.to(tl.int64) * table_stride

    r = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_WIDTH)
    heads = head * GROUP + r
    q_mask = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + b.to(tl.int64) * q_stride + heads[:, None] * HEAD_DIM + d[None, :], mask=q_mask, other=0
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_WIDTH], tl.float32)
    within = head * head_stride + d
    for block in range(start, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        valid = key < end
        # Places past the end load the last key again, which costs less than masks.
        key = tl.minimum(key, end - 1)
        page = tl.load(table + key // PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + key % PAGE_SIZE
        place = (slot * slot_stride)[:, None] + within[None, :]
        if HEAD_DIM == HEAD_WIDTH:
            k = tl.load(k_pages + place)
        else:
            k = tl.load(k_pages + place, mask=(d < HEAD_DIM)[None, :], other=0)
        score = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(valid[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(score - new_best[:, None])
        total = total * shrink + tl.sum(p, 1)
        if HEAD_DIM == HEAD_WIDTH:
            v = tl.load(v_pages + place)
        else:
            v = tl.load(v_pages + place, mask=(d < HEAD_DIM)[None, :], other=0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        best = new_best
    acc = acc / total[:, None]

    if alone:
        target = (b * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + d[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=q_mask)
    else:
        at = item * NUM_KV_HEADS * GROUP + heads
        tl.store(parts + at[:, None] * HEAD_DIM + d[None, :], acc, mask=q_mask)
        tl.store(sums + at, best + tl.log2(total), mask=r < GROUP)


@triton.jit
def _combine_kernel(
    first_item,
    parts,
    sums,
    out,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(first_item + b)  # of the plan, as above
    count = tl.load(first_item + b + 1) - begin
    enter(PDL)
    if count <= 1:
        return
    i = tl.arange(0, PARTS)
    d = tl.arange(0, HEAD_WIDTH)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_WIDTH], tl.float32)
    for first in range(0, count, PARTS):
        valid = first + i < count
        row = (begin + first + i) * NUM_HEADS + head
        lse = tl.load(sums + row, mask=valid, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(lse, 0))
        weight = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        values = tl.load(
            parts + row[:, None] * HEAD_DIM + d[None, :],
            mask=valid[:, None] & (d < HEAD_DIM)[None, :],
            other=0,
        )
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
    place = (b * NUM_HEADS + head) * HEAD_DIM + d
    tl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=d < HEAD_DIM)
