"""Gated activations: an activation of one half of each row, times the other half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .norm import FLOATS
from .runtime import enter, pdl

__all__ = ["activate", "gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]

_BLOCK = 1024
"""Columns of a program: 16 bytes of fp16 or bf16 of each half, for each thread of 4 warps."""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :I]) * x[..., I:]` for `x [..., 2 I]`: the SwiGLU of Shazeer 2020.

    The activation is computed in float32 and rounded to the dtype before the product, as the
    reference in `torch_ops` does. `x [T, 2 I]` may have any row stride; other shapes must be
    contiguous. Returns a contiguous `[..., I]`. Raises `ValueError` otherwise.
    Bytes moved: x read, half as much written: `1.5 * x.nbytes`.
    """
    return _gated(x, "silu")


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :I]) * x[..., I:]` with the exact (erf) GELU; else as `silu_and_mul`."""
    return _gated(x, "gelu")


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :I]) * x[..., I:]` with GELU's tanh approximation; else as `silu_and_mul`."""
    return _gated(x, "gelu_tanh")


def _gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] % 2 or x.dtype not in FLOATS:
        raise ValueError(f"x must be [..., 2 I] of {FLOATS}, not {tuple(x.shape)} {x.dtype}")
    if x.stride(-1) != 1 or (x.dim() > 2 and not x.is_contiguous()):
        raise ValueError(
            "x must be [T, 2 I] with a last stride of 1, or contiguous: "
            f"shape {tuple(x.shape)}, strides {x.stride()}"
        )
    inner = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], inner), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.view(-1, 2 * inner)
    _gated_kernel[(rows.shape[0], triton.cdiv(inner, _BLOCK))](
        rows, out, rows.stride(0), inner, ACTIVATION=activation, BLOCK=_BLOCK, **pdl(x)
    )
    return out


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of float32 x; neither overflow of an exponential gives a NaN."""
    if ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))  # sqrt(1 / 2)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # 0.5 (1 + tanh(u)) is the logistic function of 2 u; here 2 u, with 2 sqrt(2 / pi).
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x / (1 + tl.exp(-u))


@triton.jit
def _gated_kernel(
    x,
    out,
    x_stride,
    inner,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0)
    up = tl.load(x + row * x_stride + inner + column, mask=mask, other=0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out + row * inner + column, activated * up.to(tl.float32), mask=mask)
