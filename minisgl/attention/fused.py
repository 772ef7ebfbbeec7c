"""What the CUDA backends do before they attend: QK-norm, RoPE and the KV store in one kernel."""

from __future__ import annotations

import torch

from minisgl.core import QKV, ModelInputs
from minisgl.kernel.triton.rope import qk_norm_rope_store
from minisgl.kvcache import KVPool

__all__ = ["store_qkv"]


def store_qkv(pool: KVPool, qkv: QKV, layer_id: int, batch: ModelInputs) -> torch.Tensor:
    """Put the step's keys and values into the pool; the queries `[T, Hq, D]`, ready to attend.

    They are a view of `qkv.projected`, which is overwritten.
    """
    qk_norm_rope_store(
        qkv.projected,
        batch.positions,
        batch.out_loc,
        *pool.slots(layer_id),
        qkv.cos_sin_cache,
        qkv.num_qo_heads,
        qkv.num_kv_heads,
        qkv.head_dim,
        qkv.q_weight,
        qkv.k_weight,
        qkv.eps,
    )
    width = qkv.num_qo_heads * qkv.head_dim
    q: torch.Tensor = qkv.projected[:, :width].unflatten(-1, (qkv.num_qo_heads, qkv.head_dim))
    return q
