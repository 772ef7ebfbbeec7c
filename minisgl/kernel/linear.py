"""`linear`, and the layout of weights that makes it fast on a CPU.

A plain `[out, in]` weight goes through `F.linear`. On a CPU in bfloat16 a weight can be packed
once into oneDNN's blocked layout: the same results bit for bit, streamed from memory about
2.5 times as fast at small batches (docs/log.md), where `F.linear` walks the plain layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["can_pack", "linear", "pack_linear_weight"]

_BATCH_HINT = 32
"""oneDNN chooses the blocking for this many rows; others run well on it too."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `weight [out, in]` has a packed layout here: bfloat16 on a CPU with oneDNN.

    float32 is left plain on purpose: there, results must be the reference's.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linear_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's layout: the same shape and dtype; `to_dense()` gives it back.

    Only for weights that `can_pack`, and only `linear` may compute with the result.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`: `[T, out]`.

    It is in `out` if that is given, which a plain weight without a bias takes.
    """
    if out is not None:
        if bias is not None or weight.is_mkldnn:
            raise ValueError("linear takes `out` only with a plain weight and without a bias")
        return torch.mm(x, weight.t(), out=out)
    if weight.is_mkldnn:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return packed
    return F.linear(x, weight, bias)
