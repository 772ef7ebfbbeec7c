"""Matrix products whose rows don't depend on the batch that they are computed in.

Libraries choose another kernel for another number of rows, and so another order of additions:
a token's last bits then depend on what else is in the batch. Here each output is one float32
sum in one order, whatever T is:

    acc = 0;  for k in 0, BLOCK_K, 2 BLOCK_K, ...:  acc += x[row, k : k + BLOCK_K] . w[col, same]

No split along K, BLOCK_K fixed for each dtype, and only tiles whose inner products the tensor
cores compute by the same instruction: at least 64 rows and 4 or 8 warps mean Hopper's `wgmma` of
64 rows and a K of 16, which differs between tiles only in how many columns it does at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .runtime import INTERPRETED, enter, num_sms, pdl, reads_shared, shared_bytes

__all__ = ["Tile", "fits", "invariant_linear", "load_step"]

_INTERPRETED = tl.constexpr(INTERPRETED)


class Tile(NamedTuple):
    """What one program computes, how many of K's elements at a step, and how it is compiled."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int  # steps along K whose loads are under way, and their buffers
    swap: bool = False
    """Whether the weight is the instruction's taller operand, of 64 rows at least: few rows of x
    then don't become many empty ones. For the products of `moe.py`."""


# Widest first. All of a dtype have the same block_k: else their sums would differ.
_TILES = (
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(64, 64, 64, 4, 6),
    Tile(64, 32, 64, 4, 6),
    Tile(64, 16, 64, 4, 6),
)
_FLOAT32_TILES = (Tile(64, 32, 32, 4, 2),)  # no tensor core multiplies float32 exactly

_GROUP_M = 8
"""Row tiles that walk along the weight together, so that both operands stay in the L2 cache."""


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x W^T + bias`, in which a row's bits don't depend on T or on the row's place.

    `x [T, K]` with any row stride, `weight [N, K]` contiguous, `bias [N]`, all of one dtype of
    float32, float16 and bfloat16; returns `[T, N]`, rounded once from a float32 sum, in `out` if
    that is given.
    Raises `ValueError` otherwise. Semantics: `torch.nn.functional.linear`.
    """
    _check(x, weight, bias)
    rows, size = x.shape
    columns = weight.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    elif out.shape != (rows, columns) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be {(rows, columns)} {x.dtype}, contiguous: it is {tuple(out.shape)} "
            f"{out.dtype}"
        )
    if out.numel() == 0:
        return out
    tile = _choose(rows, columns, x)
    _invariant_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),)](
        x,
        weight,
        bias,
        out,
        rows,
        columns,
        size,
        x.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        GROUP_M=_GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(x),
    )
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "x must be [T, K] and weight [N, K]: "
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device or not x.is_floating_point():
        raise ValueError(
            "x and weight must be of one floating dtype on one device: "
            f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            "x must have a last stride of 1 and weight be contiguous: "
            f"x has strides {x.stride()}, weight {weight.stride()}"
        )
    if bias is None:
        return
    if bias.shape != weight.shape[:1] or bias.dtype != x.dtype or not bias.is_contiguous():
        raise ValueError(
            f"bias must be [N] of x's dtype, contiguous: weight is {tuple(weight.shape)} "
            f"{weight.dtype}, bias {tuple(bias.shape)} {bias.dtype}"
        )


def _choose(rows: int, columns: int, x: torch.Tensor) -> Tile:
    """The widest tile that fits and gives each multiprocessor a program, else the narrowest."""
    tiles = _FLOAT32_TILES if x.dtype == torch.float32 else _TILES
    for tile in tiles:
        if not fits(tile, x):
            continue
        programs = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
        # Tall tiles would mostly multiply rows that don't exist when x has few.
        if programs >= num_sms(x.device) and (tile.block_m <= 64 or rows > 64):
            return tile
    return tiles[-1]


def fits(tile: Tile, x: torch.Tensor) -> bool:
    """Whether the device's shared memory holds what a product of x loads ahead."""
    step_bytes = (tile.block_m + tile.block_n) * tile.block_k * x.itemsize
    # A step that tensor cores read from registers has left it before the last one's loads begin.
    stages = tile.num_stages - (0 if reads_shared(x.device) else 1)
    return stages * step_bytes <= shared_bytes(x.device)


@triton.jit
def load_step(pointers, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Elements k .. k + BLOCK_K - 1 of the rows that start at `pointers [rows, 1]`; 0 beyond K."""
    column = k + tl.arange(0, BLOCK_K)[None, :]
    if EVEN_K:
        values = tl.load(pointers + column)
    else:
        values = tl.load(pointers + column, mask=column < K, other=0)
    # The interpreter multiplies bfloat16's bits as if they were integers.
    return values.to(tl.float32) if _INTERPRETED else values


@triton.jit(do_not_specialize=["T"])
def _invariant_kernel(
    x,
    weight,
    bias,
    out,
    T,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs in order of their ids: down the row tiles of a group, then one column tile on; the
    # next group of row tiles when the columns are done. The last group may be lower.
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    height = tl.minimum(tl.cdiv(T, BLOCK_M) - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)

    enter(PDL)
    # Rows beyond the last are computed as copies of it, and not stored: loads need no mask.
    x_rows = x + tl.minimum(row, T - 1).to(tl.int64) * x_stride
    w_rows = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        x_step = load_step(x_rows, k, K, BLOCK_K, EVEN_K)
        w_step = load_step(w_rows, k, K, BLOCK_K, EVEN_K)
        acc = tl.dot(x_step, tl.trans(w_step), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + tl.minimum(column, N - 1)).to(tl.float32)[None, :]
    mask = (row < T) & (column < N)[None, :]
    tl.store(out + row.to(tl.int64) * N + column[None, :], acc, mask=mask)
