"""Who computes an op: a table of implementations, which the forward that runs now has chosen.

    with using(triton_ops()):    rmsnorm(x, w, eps)  ->  the Triton kernel
    outside of any               rmsnorm(x, w, eps)  ->  the PyTorch reference

The engine chooses once, by its configuration (`resolve.py`), and not op by op from what a tensor
looks like: so a log line at the start says which path every op takes, and it stays true. The choice
is the process's, as the current context is: engines of one process take turns in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from . import torch_ops
from .linear import linear as torch_linear

__all__ = ["OpTable", "active_ops", "reference_ops", "triton_ops", "using"]

Op = Callable[..., Any]


@dataclass(frozen=True)
class OpTable:
    """An implementation of every op that is there more than once; see `torch_ops` for each."""

    name: str
    rmsnorm: Op = torch_ops.rmsnorm
    rmsnorm_inplace: Op = torch_ops.rmsnorm_inplace
    fused_add_rmsnorm: Op = torch_ops.fused_add_rmsnorm
    apply_rope_inplace: Op = torch_ops.apply_rope_inplace
    silu_and_mul: Op = torch_ops.silu_and_mul
    gelu_and_mul: Op = torch_ops.gelu_and_mul
    gelu_tanh_and_mul: Op = torch_ops.gelu_tanh_and_mul
    indexing: Op = torch_ops.indexing
    topk_softmax: Op = torch_ops.topk_softmax
    grouped_experts: Op = torch_ops.grouped_experts
    linear: Op = torch_linear

    def describe(self) -> str:
        """Which op is computed by what, for the log."""
        paths: dict[str, list[str]] = {}
        for op, function in vars(self).items():
            if op != "name":
                paths.setdefault(function.__module__.removeprefix("minisgl."), []).append(op)
        return "; ".join(f"{', '.join(ops)}: {path}" for path, ops in paths.items())


@cache
def reference_ops() -> OpTable:
    """Plain PyTorch, on any device."""
    return OpTable("reference")


@cache
def triton_ops(deterministic: bool = False) -> OpTable:
    """Triton kernels, and cuBLAS for matrices unless results must be `deterministic`."""
    from .triton import activation, embedding, gemm, moe, norm, rope, routing

    table = OpTable(
        "triton",
        rmsnorm=norm.rmsnorm,
        rmsnorm_inplace=norm.rmsnorm_inplace,
        fused_add_rmsnorm=norm.fused_add_rmsnorm,
        apply_rope_inplace=rope.apply_rope_inplace,
        silu_and_mul=activation.silu_and_mul,
        gelu_and_mul=activation.gelu_and_mul,
        gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
        indexing=embedding.indexing,
        topk_softmax=routing.topk_softmax,
        grouped_experts=moe.grouped_experts,
    )
    return replace(table, linear=gemm.invariant_linear) if deterministic else table


_active = reference_ops()


def active_ops() -> OpTable:
    """The table of the innermost `using`."""
    return _active


@contextmanager
def using(table: OpTable) -> Iterator[None]:
    """Compute ops by `table` inside the block."""
    global _active
    outer, _active = _active, table
    try:
        yield
    finally:
        _active = outer


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `torch_ops.rmsnorm`, as for all functions below."""
    out: torch.Tensor = _active.rmsnorm(x, weight, eps)
    return out


def rmsnorm_inplace(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """In place."""
    _active.rmsnorm_inplace(x, weight, eps)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: `residual += x`, then `x = rmsnorm(residual)`."""
    _active.fused_add_rmsnorm(x, residual, weight, eps)


def apply_rope_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate query and key by their positions, in place."""
    _active.apply_rope_inplace(positions, query, key, head_size, cos_sin_cache)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`."""
    out: torch.Tensor = _active.silu_and_mul(x)
    return out


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, exact."""
    out: torch.Tensor = _active.gelu_and_mul(x)
    return out


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` by the tanh approximation."""
    out: torch.Tensor = _active.gelu_tanh_and_mul(x)
    return out


def indexing(
    weight: torch.Tensor, ids: torch.Tensor, vocab_range: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows of `weight`."""
    out: torch.Tensor = _active.indexing(weight, ids, vocab_range)
    return out


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids `[T, k]` of each token's experts."""
    out: tuple[torch.Tensor, torch.Tensor] = _active.topk_softmax(router_logits, top_k, renormalize)
    return out


def grouped_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of `weight * down(silu(gate) * up)`."""
    out: torch.Tensor = _active.grouped_experts(
        x, gate_up, down, topk_weights, topk_ids, first_expert, num_experts
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`: `[T, out]`, in `out` if
    that is given (then without a bias)."""
    result: torch.Tensor = _active.linear(x, weight, bias, out)
    return result
