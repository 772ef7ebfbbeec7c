"""Single ops of the native kernels, for what is not a whole forward: tests, and benchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .build import library
from .pack import PackedExperts, PackedWeight, linear_struct
from .pool import ThreadPool

__all__ = ["native_experts", "native_linear", "native_lookup"]


def native_linear(
    pool: ThreadPool,
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x [T, k]` float32 times up to three weights side by side, plus `bias`: `[T, sum of n]`.

    x is rounded to what each weight multiplies: bfloat16, or 8 bits with a scale for each 32
    values of a row. Results are float32.
    """
    if not 1 <= len(weights) <= 3 or any(weight.k != weights[0].k for weight in weights):
        raise ValueError(f"1 to 3 weights of the same k, not {[(w.n, w.k) for w in weights]}")
    k, outputs = weights[0].k, sum(weight.n for weight in weights)
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != k or not x.is_contiguous():
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}: it must be a contiguous float32 [T, {k}]"
        )
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,)):
        raise ValueError(f"bias is {tuple(bias.shape)} {bias.dtype}, not [{outputs}] float32")
    out = torch.empty(x.shape[0], outputs)
    bias = None if bias is None else bias.contiguous()  # kept until the call is over
    linear = linear_struct(weights, None if bias is None else bias.data_ptr())
    library().minisgl_linear(
        pool.handle,
        ctypes.byref(linear),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def native_experts(pool: ThreadPool, x: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    """What a mixture of experts with SiLU gives for `x [T, hidden]` float32: `[T, hidden]`."""
    hidden = experts.router[0].k
    if x.dtype != torch.float32 or x.shape[1:] != (hidden,) or not x.is_contiguous():
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}: it must be a contiguous float32 [T, {hidden}]"
        )
    out = torch.zeros_like(x)
    struct = experts.struct()
    library().minisgl_experts(
        pool.handle,
        ctypes.byref(struct),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.shape[0]),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def native_lookup(weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids [T]` int64 of a packed weight, `[T, k]` float32: what an embedding gives."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids is {tuple(ids.shape)} {ids.dtype}: it must be int64 [T]")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise ValueError(f"ids reach from {ids.min()} to {ids.max()}: there are {weight.n} rows")
    out = torch.empty(ids.shape[0], weight.k)
    packed, ids = weight.struct(), ids.contiguous()
    library().minisgl_lookup(
        ctypes.byref(packed),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_int64(ids.shape[0]),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out
