"""Every op of the models, and the choice of who computes it.

Owns: the ops' names and semantics, their PyTorch references (`torch_ops.py`,
`torch_attention.py`, `sampling.py`) and the dispatch to faster ones (`linear.py`). Does not
own: weights (`layers/`), pages (`kvcache/`), or which requests run (`scheduler/`).
Invariant: whatever computes an op, it has the reference's semantics.

The ops exported here are what layers call; but for `linear` on CPUs the reference is their only
implementation so far, on every device that torch has. On a CPU a dense model takes none of them:
`cpu/` computes its whole step in one native call.
Read next: `cpu/`, or `minisgl/layers/`.
"""

from __future__ import annotations

from .linear import linear, pack_linear_weight
from .torch_ops import (
    apply_rope_inplace,
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    grouped_experts,
    indexing,
    rmsnorm,
    rmsnorm_inplace,
    silu_and_mul,
    store_kv,
    topk_softmax,
)

__all__ = [
    "apply_rope_inplace",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "grouped_experts",
    "indexing",
    "linear",
    "pack_linear_weight",
    "rmsnorm",
    "rmsnorm_inplace",
    "silu_and_mul",
    "store_kv",
    "topk_softmax",
]
