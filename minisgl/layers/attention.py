"""Attention between the projections: split, QK-norm, RoPE, and the backend's work."""

from __future__ import annotations

import torch

from minisgl.core import QKV, get_global_ctx

from .base import StateLessOP
from .linear import local_heads
from .norm import RMSNorm
from .rotary import RotaryEmbedding

__all__ = ["AttentionLayer"]


class AttentionLayer(StateLessOP):
    """Attention of one decoder layer; writing the KV cache is the backend's part.

    `q_norm` and `k_norm` belong to the attention block that holds this layer, which lists them.
    """

    def __init__(
        self,
        layer_id: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        qk_norm: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.layer_id = layer_id
        self.head_dim = head_dim
        self.num_qo_heads, self.num_kv_heads = local_heads(num_qo_heads, num_kv_heads)
        self.rotary = rotary
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = qk_norm
        q_size, kv_size = self.num_qo_heads * head_dim, self.num_kv_heads * head_dim
        self._split = (q_size, kv_size, kv_size)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """`qkv [T, (Hq + 2 Hk) D]`, overwritten, to `[T, Hq D]`."""
        ctx = get_global_ctx()
        if ctx.attn_backend.fuses_qkv:
            return ctx.attn_backend.forward_qkv(self._fused(qkv), self.layer_id, ctx.batch).flatten(
                -2
            )
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(self._split, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.forward_inplace(q)
            self.k_norm.forward_inplace(k)
        self.rotary.forward(ctx.batch.positions, q, k)
        out = ctx.attn_backend.forward(q, k, v, self.layer_id, ctx.batch)
        return out.flatten(-2)

    def _fused(self, qkv: torch.Tensor) -> QKV:
        q_norm, k_norm = self.q_norm, self.k_norm
        return QKV(
            qkv,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary.cos_sin_cache,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
