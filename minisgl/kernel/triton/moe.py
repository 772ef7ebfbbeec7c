"""What a mixture's experts compute, for pairs of a token and an expert that `routing.py` grouped.

    1  inner[i] = silu(gate) * up of pair order[i]: gathers rows of x, writes them in this order
    2  pairs[order[i]] = weight * down(inner[i])
    3  out[t] = the sum of pairs[t k : t k + k]

A program of 1 and 2 has a block of pairs and some of its expert's columns; the grids have room for
the most blocks that there can be, and surplus programs return at once.

Bits: nothing is added atomically. Each output of 1 and 2 is one float32 sum in the order of K,
whatever place and block its pair is in, and 3 adds in the order of the token's experts. So a
token's result doesn't depend on what the others are, or chose, as long as T chooses the same tile;
different tiles are as alike as the tensor core's instructions for them (see `gemm.py`): on Hopper
the tiles below give the same bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .activation import activate
from .gemm import Tile, fits, load_step
from .norm import FLOATS
from .routing import MAX_EXPERTS, group_pairs
from .runtime import enter, pdl

__all__ = ["grouped_experts"]


# By how many pairs an expert has in the mean, at most. Where weights are what takes the time, a
# block has room for twice as many: most experts' weights are read once.
_TILES = (
    (8, Tile(16, 128, 64, 4, 5, swap=True)),
    (16, Tile(32, 128, 64, 4, 5, swap=True)),
    (64, Tile(64, 256, 64, 4, 4)),
    (math.inf, Tile(128, 256, 64, 8, 4)),
)
_SMALL_TILE = Tile(64, 64, 64, 4, 4)  # for devices with less shared memory
_FLOAT32_TILE = Tile(32, 32, 32, 4, 2)  # no tensor core multiplies float32 exactly

_BLOCK = 1024
"""Columns of a program of the last sum."""


def grouped_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of `weight * down(silu(gate) * up)`: `[T, hidden]`.

    `x [T, hidden]` with any row stride, `gate_up [E, 2 I, hidden]`, `down [E, hidden, I]`,
    `topk_weights [T, k]` of one dtype of float32, float16 and bfloat16, `topk_ids [T, k]` int32 or
    int64; all but x contiguous, E <= 512. The E experts given are `first_expert` and those after
    it, of `num_experts` (None: all there are): others' pairs add nothing. Raises `ValueError`
    otherwise. Semantics: `torch_ops.grouped_experts`, rounding where it does, but for the sum,
    which is rounded once.
    Bytes moved: the weights of each expert with a pair, once if it has at most a block of them,
    and `T k (2 hidden + 2 I)` elements, mostly in the L2 cache for small T.
    """
    _check(x, gate_up, down, topk_weights, topk_ids)
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    experts, _, inner_size = down.shape
    if 0 in (topk_ids.numel(), down.numel()):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    tile = _choose(topk_ids.numel() / (num_experts or experts), x)
    order, blocks = group_pairs(topk_ids, first_expert, experts, tile.block_m)
    inner = x.new_empty(topk_ids.numel(), inner_size)
    _launch(_gate_up_kernel, tile, 2 * inner_size, blocks, x, gate_up, order, inner, top_k)
    pairs = x.new_empty(topk_ids.numel(), hidden)
    _launch(_down_kernel, tile, hidden, blocks, inner, down, order, pairs, topk_weights)
    out = x.new_empty(tokens, hidden)
    _sum_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
        pairs,
        topk_ids,
        out,
        first_expert,
        experts,
        hidden,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        **pdl(x),
    )
    return out


def _check(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    shapes = (
        f"x is {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}, "
        f"weights {tuple(weights.shape)}, ids {tuple(ids.shape)}"
    )
    if x.dim() != 2 or down.dim() != 3 or ids.dim() != 2:
        raise ValueError(f"x and ids must be of 2 dimensions, down of 3: {shapes}")
    experts, hidden, inner = down.shape
    if (
        x.shape[1] != hidden
        or gate_up.shape != (experts, 2 * inner, hidden)
        or weights.shape != ids.shape
        or ids.shape[0] != x.shape[0]
        or experts > MAX_EXPERTS
    ):
        raise ValueError(
            "x must be [T, hidden], gate_up [E, 2 I, hidden], down [E, hidden, I], weights and "
            f"ids [T, k], with E up to {MAX_EXPERTS}: {shapes}"
        )
    dtypes = [t.dtype for t in (x, gate_up, down, weights)]
    if x.dtype not in FLOATS or len(set(dtypes)) != 1:
        raise ValueError(f"x, gate_up, down and weights must be of one of {FLOATS}: {dtypes}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64, not {ids.dtype}")
    strides = [t.stride() for t in (gate_up, down, weights, ids)]
    if x.stride(1) != 1 or not all(t.is_contiguous() for t in (gate_up, down, weights, ids)):
        raise ValueError(
            "x must have a last stride of 1, gate_up, down, weights and ids be contiguous: "
            f"x has strides {x.stride()}, the others {strides}"
        )


def _choose(mean: float, x: torch.Tensor) -> Tile:
    """The tile for experts with `mean` pairs on average."""
    if x.dtype == torch.float32:
        return _FLOAT32_TILE
    tile = next(tile for most, tile in _TILES if mean <= most)
    return tile if fits(tile, x) else _SMALL_TILE


def _launch(kernel, tile: Tile, columns: int, blocks, rows, weight, order, out, extra) -> None:
    """A grouped product of `rows [n, K]` with `weight [E, columns, K]`."""
    size = weight.shape[2]
    kernel[(blocks.shape[0] * triton.cdiv(columns, tile.block_n),)](
        rows,
        weight,
        order,
        blocks,
        out,
        extra,
        columns,
        size,
        rows.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        SWAP=tile.swap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(rows),
    )


@triton.jit
def _product(
    x_rows,
    w_rows,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    """float32 `[BLOCK_M, BLOCK_N]`: the rows at `x_rows [BLOCK_M, 1]` times those at `w_rows`."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        w_step = load_step(w_rows, k, K, BLOCK_K, EVEN_K)
        x_step = load_step(x_rows, k, K, BLOCK_K, EVEN_K)
        if SWAP:
            acc = tl.dot(w_step, tl.trans(x_step), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_step, tl.trans(w_step), acc, input_precision="ieee")
    return tl.trans(acc) if SWAP else acc


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    order,
    blocks,
    inner,
    top_k,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_N)
    block = blocks + tl.program_id(0) // tiles * 3
    tile = tl.program_id(0) % tiles
    enter(PDL)
    expert = tl.load(block)
    if expert < 0:
        return
    first = tl.load(block + 1)
    last = tl.load(block + 2)
    # A gate's row of the weight and then its up's, in turn: a thread gets both of them.
    line = tl.arange(0, BLOCK_N)
    column = tl.minimum(tile * (BLOCK_N // 2) + line // 2, N // 2 - 1)
    w_row = expert.to(tl.int64) * N + line % 2 * (N // 2) + column
    # Rows beyond the last are computed as copies of it, and not stored: loads need no mask.
    row = first + tl.arange(0, BLOCK_M)
    token = tl.load(order + tl.minimum(row, last - 1)) // top_k
    acc = _product(
        x + token.to(tl.int64)[:, None] * x_stride,
        weight + w_row[:, None] * K,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        SWAP,
    )
    DTYPE: tl.constexpr = inner.dtype.element_ty
    gate, up = tl.split(tl.reshape(acc.to(DTYPE), (BLOCK_M, BLOCK_N // 2, 2)))
    activated = activate(gate.to(tl.float32), "silu").to(DTYPE).to(tl.float32)
    column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    mask = (row < last)[:, None] & (column < N // 2)
    written = inner + row.to(tl.int64)[:, None] * (N // 2) + column
    tl.store(written, activated * up.to(tl.float32), mask=mask)


@triton.jit
def _down_kernel(
    inner,
    weight,
    order,
    blocks,
    pairs,
    topk_weights,
    N,
    K,
    inner_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(N, BLOCK_N)
    block = blocks + tl.program_id(0) // tiles * 3
    tile = tl.program_id(0) % tiles
    enter(PDL)
    expert = tl.load(block)
    if expert < 0:
        return
    first = tl.load(block + 1)
    last = tl.load(block + 2)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = expert.to(tl.int64) * N + tl.minimum(column, N - 1)
    row = first + tl.arange(0, BLOCK_M)
    held = tl.minimum(row, last - 1)
    acc = _product(
        inner + held.to(tl.int64)[:, None] * inner_stride,
        weight + w_row[:, None] * K,
        K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
        SWAP,
    )
    pair = tl.load(order + held)
    scale = tl.load(topk_weights + pair).to(tl.float32)[:, None]
    scaled = acc.to(pairs.dtype.element_ty).to(tl.float32) * scale
    mask = (row < last)[:, None] & (column < N)[None, :]
    tl.store(pairs + pair.to(tl.int64)[:, None] * N + column[None, :], scaled, mask=mask)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    pairs,
    ids,
    out,
    first_expert,
    E,
    hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + j) - first_expert
        held = (expert >= 0) & (expert < E)
        read = pairs + (token * TOP_K + j) * hidden + column
        acc += tl.load(read, mask=(column < hidden) & held, other=0).to(tl.float32)
    tl.store(out + token * hidden + column, acc, mask=column < hidden)
