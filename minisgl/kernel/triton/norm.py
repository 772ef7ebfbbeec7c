"""RMSNorm over the last dimension, alone or with the residual's sum.

A program computes one row, or several where rows are short (the heads of a QK-norm), and holds
them in registers between the sum of squares and the product: each element is read once. The
rounding is the reference's: to the dtype before the weight, and again after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import enter, pdl

__all__ = ["FLOATS", "fused_add_rmsnorm", "normalize", "rmsnorm", "rmsnorm_inplace"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What activations may be; computed in float32."""
_PROGRAM_SIZE = 1024
"""Elements of a program of short rows: 16 bytes of fp16 or bf16 for each thread of 4 warps."""


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, statistics in float32.

    `x [..., size]`, which may be a view with any strides but the last (heads of a merged
    projection), `weight [size]` of the same dtype; returns a new contiguous tensor.
    Raises `ValueError` for other shapes, dtypes or strides. Semantics: `torch_ops.rmsnorm`.
    Bytes moved: x read, the result written: `2 * x.nbytes`, and the weight.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rmsnorm(x, out, weight, eps)
    return out


def rmsnorm_inplace(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`x = rmsnorm(x)`, with the same arguments, errors and bytes moved."""
    _rmsnorm(x, x, weight, eps)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: `residual += x`, rounded to the dtype, then `x = rmsnorm(residual)`.

    Both `[T, hidden]` of one dtype, contiguous in the last dimension; `weight [hidden]`.
    Raises `ValueError` otherwise. Semantics: `torch_ops.fused_add_rmsnorm`.
    Bytes moved: both read and written: `4 * x.nbytes`, and the weight.
    """
    _check(x, weight)
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"x and residual must be [T, hidden] of one dtype: x is {tuple(x.shape)} {x.dtype}, "
            f"residual {tuple(residual.shape)} {residual.dtype}"
        )
    if residual.stride(1) != 1:
        raise ValueError(f"residual's last stride must be 1, not {residual.stride(1)}")
    rows, size = x.shape
    if rows == 0:
        return
    block, rows_each, num_warps = _tile(size)
    _fused_add_rmsnorm_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        residual,
        weight,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_each,
        num_warps=num_warps,
        **pdl(x),
    )


def _rmsnorm(x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Norm the rows of x into out, which may be x."""
    _check(x, weight)
    if x.numel() == 0:
        return
    x = _as_rows(x)
    out = out.view(x.shape)
    rows, inner, size = x.shape[0] * x.shape[1], x.shape[1], x.shape[2]
    block, rows_each, num_warps = _tile(size)
    _rmsnorm_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        out,
        weight,
        rows,
        inner,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows_each,
        num_warps=num_warps,
        **pdl(x),
    )


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """What every norm needs of its input and weight."""
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            "weight must be of x's last dimension and dtype: "
            f"x is {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError(
            "The last stride of x and weight must be 1: "
            f"x has {x.stride(-1)}, weight {weight.stride(0)}"
        )


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as `[n, inner, size]` without a copy; inner is 1 where the rows have one stride."""
    if x.dim() <= 2 or x.is_contiguous():
        return x.view(-1, 1, x.shape[-1])
    try:
        return x.view(-1, x.shape[-2], x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"All dimensions of x but the last two must have one stride: shape {tuple(x.shape)}, "
            f"strides {x.stride()}"
        ) from None


def _tile(size: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program, for rows of `size`."""
    block = triton.next_power_of_2(size)
    # A thread loads 16 bytes (8 elements of 2 bytes) for 1,024 columns, and four times as much
    # of the longest rows: the sum over the program's warps costs more, the more there are.
    return block, max(1, _PROGRAM_SIZE // block), min(16, max(4, block // 512))


@triton.jit
def normalize(x, square_sum, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """x and weight, float32, to the norm's result in float32: rounded to dtype before the weight.

    The caller rounds the result, by storing it or with `.to(dtype)`. `square_sum` is that of each
    row of SIZE elements, in x's shape but for a last dimension of 1.
    """
    return (x * tl.rsqrt(square_sum / SIZE + eps)).to(dtype).to(tl.float32) * weight


@triton.jit
def _row_tile(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows `[ROWS, 1]`, its columns `[ROWS, BLOCK]`, and which of them exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    # Repeated for each row, so that the weight is loaded in the same layout as x: as a vector it
    # would be spread over the threads differently, and be exchanged through shared memory.
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    return row, column, (row < rows) & (column < SIZE)


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_kernel(
    x,
    out,
    weight,
    rows,
    inner,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    row, column, mask = _row_tile(rows, SIZE, BLOCK, ROWS)
    outer, head = (row // inner).to(tl.int64), row % inner
    values = tl.load(x + outer * x_outer + head * x_inner + column, mask=mask, other=0)
    weights = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    wide = values.to(tl.float32)
    square_sum = tl.sum(wide * wide, axis=1, keep_dims=True)
    normed = normalize(wide, square_sum, weights, eps, SIZE, values.dtype)
    tl.store(out + outer * out_outer + head * out_inner + column, normed, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _fused_add_rmsnorm_kernel(
    x,
    residual,
    weight,
    rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    row, column, mask = _row_tile(rows, SIZE, BLOCK, ROWS)
    row = row.to(tl.int64)
    x_tile, residual_tile = x + row * x_stride + column, residual + row * residual_stride + column
    values = tl.load(x_tile, mask=mask, other=0)
    before = tl.load(residual_tile, mask=mask, other=0)
    weights = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    total = (before.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
    tl.store(residual_tile, total, mask=mask)
    wide = total.to(tl.float32)
    square_sum = tl.sum(wide * wide, axis=1, keep_dims=True)
    tl.store(x_tile, normalize(wide, square_sum, weights, eps, SIZE, values.dtype), mask=mask)
