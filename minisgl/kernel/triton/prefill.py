"""Causal attention of many tokens a request over paged keys and values, in one launch.

The tokens of B requests lie one after the other in the batch, any number of each. The work is cut
into items, each a block of neighbouring tokens of one request; a program takes an item and a KV
head. The G query heads that share this KV head are stacked into the rows of its tile: row r is
token r // G, head r % G (Ainslie et al. 2023). The softmax is computed on the fly, one block of
keys after the other (Milakov and Gimelshein 2018, Dao et al. 2022).

Invariant: what a token gets depends on nothing but its query, its position and its keys, to the
last bit. Blocks of keys begin at multiples of `block_n` in absolute positions, all rows of a tile
are computed alike, and a block in which a row sees no key leaves the row's sums as they are: so
neither the item's other tokens, nor chunks, nor the batch matter.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .runtime import enter, pdl, shared_bytes

__all__ = ["PrefillPlan", "Tiles", "block_tokens", "prefill_attention"]


class PrefillPlan(NamedTuple):
    """Who computes what in a batch: device tensors, int32, contiguous."""

    items: torch.Tensor
    """`[n, 2]`: a request's place b in the batch, and the block's first token, counted from the
    request's first token of this step. The block is `block_tokens` tokens or what is left. The
    last items are started first, so keep a request's in order: later ones have more keys."""
    num_items: torch.Tensor
    """`[1]`: how many of the n items are there; the rest isn't read."""
    rows: torch.Tensor
    """`[B]`: each request's row of the page table."""
    starts: torch.Tensor
    """`[B + 1]`: the first token of each request in the batch, and the end of the last one's."""
    seq_lens: torch.Tensor
    """`[B]`: keys of each request, this step's own tokens counted. Token i of the request's n =
    `starts[b + 1] - starts[b]` tokens sits at position `seq_lens[b] - n + i`."""


class Tiles(NamedTuple):
    """How a program is cut."""

    block_n: int
    """Keys of a block."""
    num_warps: int
    num_stages: int
    """Blocks under way at once: one's page numbers, the next one's keys, one's arithmetic."""


_TILES = {  # by padded head size
    64: Tiles(64, 4, 3),
    128: Tiles(64, 4, 3),
    256: Tiles(64, 8, 3),
}
"""For 16 bits a number, where a program may have `_MUCH_SHARED` or more; 128 is measured on an H200
(docs/log.md)."""

_SMALL_TILES = {
    64: Tiles(64, 8, 3),
    128: Tiles(64, 8, 3),
    256: Tiles(32, 8, 3),
}
"""For 16 bits a number elsewhere: they take up to 69 KB, most devices have 99 KB."""

_FLOAT32_TILES = {
    64: Tiles(32, 8, 1),
    128: Tiles(16, 8, 1),
    256: Tiles(16, 8, 1),
}
"""For float32 on any device, with `_FLOAT32_ROWS`. Without tensor cores all of a tile lies in
registers: larger ones don't fit there, and take seconds to compile."""

_FLOAT32_ROWS = {64: 32, 128: 32, 256: 16}
_LOW_ROWS = 64
"""For `low`: the fewest that four warps of Hopper multiply at once. A row's bits are those that it
has in a taller tile: its sums run along keys and head size, which are cut alike."""
_MUCH_SHARED = 200 << 10  # bytes


def block_tokens(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, low: bool = False
) -> int:
    """How many tokens of a request one item of the plan covers; `low` as in `prefill_attention`.

    Raises `ValueError` where no tile takes the heads: their size is above 256, or a KV head serves
    more query heads than a tile can have rows (128, or 64 where the size is above 128).
    """
    group = num_qo_heads // num_kv_heads
    if group * num_kv_heads != num_qo_heads or not 0 < group <= _max_rows(head_dim):
        raise ValueError(
            f"{num_qo_heads} query heads over {num_kv_heads} KV heads: each must serve the same "
            f"number of them, {_max_rows(head_dim)} at most at head size {head_dim}"
        )
    return _block_m(group, head_dim, dtype, low) // group


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    low: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """Write to `out` the causal attention of the plan's tokens over the keys in their pages.

    `q [T, Hq, D]` may be a view into rows that hold more, `out [T, Hq, D]` is contiguous;
    `k_pages, v_pages [P, page_size, Hk, D]` are one layer of the pool, and hold this step's own
    keys too; `page_table [rows, max_pages]` is int32. A token sees the keys up to its own, with a
    window only the last `window` of these (as in Hugging Face, its own counts). The scores are
    scaled by `scale`; they and the sums are float32, the weights are rounded to the pages' dtype.
    `low` takes tiles of fewer rows, for requests of one token each, with the same bits.
    `tiles` overrides the device's, for tuning.

    Raises `ValueError` for a shape, dtype or layout that isn't so. The plan's and the page table's
    contents, which only the device knows, are trusted.
    """
    _check(q, k_pages, v_pages, page_table, plan, out)
    num_qo_heads, head_dim = q.shape[1:]
    page_size, num_kv_heads = k_pages.shape[1:3]
    tokens = block_tokens(num_qo_heads, num_kv_heads, head_dim, q.dtype, low=low)
    group = num_qo_heads // num_kv_heads
    if scale <= 0 or (window is not None and window < 1):
        raise ValueError(f"scale and window must be positive, got {scale} and {window}")
    if plan.items.shape[0] == 0:
        return
    tiles = tiles or _choose_tiles(head_dim, q.dtype, q.device, low)
    _prefill_kernel[(plan.items.shape[0] * num_kv_heads,)](
        q,
        k_pages,
        v_pages,
        page_table,
        *plan,
        out,
        q.stride(0),
        page_table.stride(0),
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        WINDOW=window,
        BLOCK_TOKENS=tokens,
        BLOCK_M=_block_m(group, head_dim, q.dtype, low),
        BLOCK_N=tiles.block_n,
        BLOCK_D=_padded(head_dim),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl(q),
    )


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    rows_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    q_stride,
    table_stride,
    log2_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    # Neighbouring programs are the KV heads of one item: they read neighbouring memory. The last
    # items are started first: they have the most keys, and the short ones fill up the end.
    head = tl.program_id(0) % NUM_KV_HEADS
    enter(PDL)
    item = tl.load(num_items_ptr) - 1 - tl.program_id(0) // NUM_KV_HEADS
    if item < 0:
        return
    place = tl.load(items_ptr + 2 * item)
    first = tl.load(items_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + place)
    num_tokens = tl.load(starts_ptr + place + 1) - start
    seq_len = tl.load(seq_lens_ptr + place)
    table_ptr += tl.load(rows_ptr + place).to(tl.int64) * table_stride
    k_ptr += head * HEAD_DIM
    v_ptr += head * HEAD_DIM

    # Row r is token r // GROUP of the block, and query head r % GROUP of the KV head's.
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)[None, :]
    token = row // GROUP
    num_rows = tl.minimum(num_tokens - first, BLOCK_TOKENS) * GROUP
    valid = (row < num_rows)[:, None]
    if BLOCK_D != HEAD_DIM:
        valid = valid & (dim < HEAD_DIM)
    column = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim
    q_ptr += (start + first).to(tl.int64) * q_stride
    q = tl.load(q_ptr + token[:, None] * q_stride + column, mask=valid, other=0.0)

    # The block's tokens sit at positions low to high. Rows beyond them, which are not stored, take
    # the last one's: so they see a key, and are not divided by 0.
    low = seq_len - num_tokens + first
    high = low + num_rows // GROUP - 1
    position = tl.minimum(low + token, high)[:, None]

    # In the blocks of [inner, outer) every row sees every key; in the others, rows' keys end:
    #
    #     begin           inner               outer           high
    #       | window's border | no mask needed | the diagonal |
    #
    begin = 0
    inner = 0
    outer = (low + 1) // BLOCK_N * BLOCK_N
    # Before any key: less than any score, and finite, for -inf minus itself is NaN.
    top = tl.full([BLOCK_M], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW is not None:
        begin = tl.maximum(low - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        inner = tl.cdiv(tl.maximum(high - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        top, total, acc = _attend(
            top, total, acc, q, k_ptr, v_ptr, table_ptr, position, begin, inner, high, log2_scale,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    top, total, acc = _attend(
        top, total, acc, q, k_ptr, v_ptr, table_ptr, position, inner, outer, high, log2_scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    top, total, acc = _attend(
        top, total, acc, q, k_ptr, v_ptr, table_ptr, position, tl.maximum(inner, outer), high + 1,
        high, log2_scale,
        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    OUT_STRIDE: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    out_ptr += (start + first).to(tl.int64) * OUT_STRIDE
    tl.store(out_ptr + token[:, None] * OUT_STRIDE + column, result, mask=valid)


@triton.jit
def _attend(
    top,
    total,
    acc,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    position,
    begin,
    end,
    high,
    log2_scale,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the blocks of keys from `begin` up to `end` into each row's sums.

    A row has `top`, its largest score so far as a power of 2, `total`, the sum of its weights
    2^(score - top), and `acc`, the sum of the values by them. Keys above position `high` are not
    read. A row whose keys are all seen gets the same bits with a mask as without: `fma`, written
    out, leaves the compiler no choice of what to round.
    """
    ahead = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key = start + ahead
        if PAGE_SIZE % BLOCK_N == 0:  # one page holds the block
            page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
            slots = page * PAGE_SIZE + start % PAGE_SIZE
            offsets = slots * SLOT_STRIDE + (ahead[:, None] * SLOT_STRIDE + dim)
        else:
            page_ptr = table_ptr + key // PAGE_SIZE
            page = tl.load(page_ptr, mask=key <= high, other=0) if MASKED else tl.load(page_ptr)
            slots = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
            offsets = slots[:, None] * SLOT_STRIDE + dim

        read = (key <= high)[:, None]
        k = _load(k_ptr + offsets, read, dim, HEAD_DIM, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = key[None, :] <= position
            if WINDOW is not None:
                seen = seen & (key[None, :] > position - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        # A row that sees no key of the block stays as it is: rescaled by 1, weights of 0 added.
        new_top = tl.maximum(top, tl.max(scores, 1) * log2_scale)
        weights = tl.exp2(tl.fma(scores, log2_scale, -new_top[:, None]))
        rescale = tl.exp2(top - new_top)
        total = tl.fma(total, rescale, tl.sum(weights, 1))
        acc = acc * rescale[:, None]
        v = _load(v_ptr + offsets, read, dim, HEAD_DIM, BLOCK_D, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _load(
    ptr,
    read,
    dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of keys or values; 0 where `read` is false or the head size is padded."""
    if MASKED:
        return tl.load(ptr, mask=read & (dim < HEAD_DIM), other=0.0)
    elif BLOCK_D != HEAD_DIM:
        return tl.load(ptr, mask=dim < HEAD_DIM, other=0.0)
    else:
        return tl.load(ptr)


def _max_rows(head_dim: int) -> int:
    """Most rows of a tile."""
    if not 0 < head_dim <= 256:
        raise ValueError(f"Head size {head_dim}: at most 256 is possible")
    return 128 if head_dim <= 128 else 64


def _block_m(group: int, head_dim: int, dtype: torch.dtype, low: bool) -> int:
    """Rows of a tile. The items are cut by it, so it is no matter of the device."""
    rows: int = triton.next_power_of_2(group)
    if dtype is not torch.float32:
        return max(_LOW_ROWS, rows) if low else _max_rows(head_dim)
    return max(_FLOAT32_ROWS[_size_class(head_dim)], rows)


def _padded(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(16, size)


def _size_class(head_dim: int) -> int:
    """What the tables of tiles go by."""
    return max(64, _padded(head_dim))


@functools.cache
def _choose_tiles(
    head_dim: int, dtype: torch.dtype, device: torch.device, low: bool = False
) -> Tiles:
    """Tiles that fit into the device's shared memory."""
    size = _size_class(head_dim)
    if dtype is torch.float32:
        return _FLOAT32_TILES[size]
    tiles = (_TILES if shared_bytes(device) >= _MUCH_SHARED else _SMALL_TILES)[size]
    # A warp takes 16 rows: more warps would share a row's sums.
    return tiles._replace(num_warps=4) if low and size <= 128 else tiles


def _check(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
) -> None:
    head_dim = q.shape[-1]
    if q.ndim != 3 or q.stride()[1:] != (head_dim, 1):
        raise ValueError(f"q must be [T, Hq, D], a token's heads contiguous, got {_layout(q)}")
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous, of q's shape {[*q.shape]}, got {_layout(out)}")
    if k_pages.ndim != 4 or k_pages.shape[3] != head_dim or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must both be [P, page_size, Hk, {head_dim}], "
            f"got {_layout(k_pages)} and {_layout(v_pages)}"
        )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(
            f"The pages must be contiguous, got {_layout(k_pages)} and {_layout(v_pages)}"
        )
    dtypes = [tensor.dtype for tensor in (q, k_pages, v_pages, out)]
    if len({*dtypes}) > 1 or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            "q, k_pages, v_pages and out must have one dtype, float32, float16 or bfloat16, "
            f"got {', '.join(map(str, dtypes))}"
        )
    if page_table.ndim != 2 or page_table.stride(1) != 1 or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table must be [rows, max_pages] int32, rows contiguous, got "
            f"{_layout(page_table)}"
        )
    num_requests = len(plan.rows)
    shapes = [(len(plan.items), 2), (1,), (num_requests,), (num_requests + 1,), (num_requests,)]
    for name, tensor, shape in zip(plan._fields, plan, shapes, strict=True):
        if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"plan.{name} must be int32 {[*shape]}, contiguous, got {_layout(tensor)}"
            )


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {[*tensor.shape]} with strides {[*tensor.stride()]}"
