"""The decoder that Llama, Mistral, Mixtral, Qwen2, Qwen3 and the Qwen-MoEs share.

What differs between them is data: biases, windows, experts and sizes in `ModelConfig`, and two
switches, `has_qk_norm` and whether a layer's MLP has experts.
"""

from __future__ import annotations

import torch

from minisgl.core import get_global_ctx
from minisgl.layers import BaseOP, OPList, ParallelLMHead, RMSNormFused, VocabParallelEmbedding

from .base import BaseLLMModel
from .config import ModelConfig
from .utils import GatedMLP, MoEMLP, RopeAttn

__all__ = ["CausalLM", "DecoderLayer", "DecoderModel"]


class DecoderLayer(BaseOP):
    """Attention and MLP around the residual stream, normalized before each (pre-norm)."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        has_qk_norm: bool = False,
        use_moe: bool = False,
    ) -> None:
        self.self_attn = RopeAttn(config, layer_id, has_qk_norm=has_qk_norm)
        self.mlp = MoEMLP(config) if use_moe else GatedMLP(config)
        self.input_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(x, residual)`, both `[T, hidden]`, of the next layer; `residual` is None at first."""
        x, residual = self.input_layernorm.forward(x, residual)
        x = self.self_attn.forward(x)
        x, residual = self.post_attention_layernorm.forward(x, residual)
        return self.mlp.forward(x), residual


class DecoderModel(BaseOP):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, *, has_qk_norm: bool) -> None:
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = OPList(
            [
                DecoderLayer(config, i, has_qk_norm=has_qk_norm, use_moe=config.is_sparse(i))
                for i in range(config.num_layers)
            ]
        )
        self.norm = RMSNormFused(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids [T]` to the normalized hidden states `[T, hidden]`."""
        x, residual = self.embed_tokens.forward(input_ids), None
        for layer in self.layers:
            x, residual = layer.forward(x, residual)
        return self.norm.forward(x, residual)[0]


class CausalLM(BaseLLMModel):
    """The decoder with its vocabulary head."""

    def __init__(self, config: ModelConfig, *, has_qk_norm: bool = False) -> None:
        """`has_qk_norm`: an RMSNorm on each query and key head before RoPE."""
        self.model = DecoderModel(config, has_qk_norm=has_qk_norm)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied)

    def forward(self) -> torch.Tensor:
        """Logits `[size, vocab_size]` of the current batch."""
        return self.lm_head.forward(self.model.forward(get_global_ctx().batch.input_ids))
