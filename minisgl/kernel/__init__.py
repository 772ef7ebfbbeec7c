"""Every op of the models, and the choice of who computes it.

Owns: the ops' names and semantics, their PyTorch references (`torch_ops.py`,
`torch_attention.py`, `sampling.py`), faster ones for CUDA (`triton/`) and CPUs (`cpu/`), and the
choice among them (`dispatch.py`). Does not own: weights (`layers/`), pages (`kvcache/`), or which
requests run (`scheduler/`).
Invariant: whatever computes an op, it has the reference's semantics.

The ops exported here are what layers call. On a CPU most models take none of them: `cpu/`
computes its whole step in one native call.
Read next: `dispatch.py`, then `triton/`, `cpu/` or `minisgl/layers/`.
"""

from __future__ import annotations

from .dispatch import (
    apply_rope_inplace,
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    grouped_experts,
    indexing,
    linear,
    rmsnorm,
    rmsnorm_inplace,
    silu_and_mul,
    topk_softmax,
)
from .linear import pack_linear_weight
from .torch_ops import store_kv

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
