"""The parts of a decoder layer, switched by the config."""

from __future__ import annotations

import torch

from minisgl.errors import UnsupportedModelError
from minisgl.layers import (
    AttentionLayer,
    BaseOP,
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
    MoELayer,
    RMSNorm,
    get_gated_activation,
    get_rope,
)
from minisgl.layers.quantized import apply_linear

from .config import ModelConfig

__all__ = ["GatedMLP", "MoEMLP", "RopeAttn"]


class RopeAttn(BaseOP):
    """Self-attention with rotary positions: qkv_proj, optional per-head QK-norm, o_proj."""

    def __init__(self, config: ModelConfig, layer_id: int, *, has_qk_norm: bool) -> None:
        heads, kv_heads, head_dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = LinearQKVMerged(
            config.hidden_size, head_dim, heads, kv_heads, config.attention_bias
        )
        qk_norm = None
        if has_qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
            qk_norm = (self.q_norm, self.k_norm)
        rotary = config.rotary_config
        rope = get_rope(
            rotary.head_dim,
            rotary.rotary_dim,
            rotary.max_position,
            rotary.base,
            rotary.scaling,
            table_length=rotary.table_length,
        )
        self.attn = AttentionLayer(layer_id, heads, kv_heads, head_dim, rope, qk_norm)
        self.o_proj = LinearOProj(heads, head_dim, config.hidden_size, config.output_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]`."""
        return self.o_proj.forward(self.attn.forward(self.qkv_proj.forward(x)))


class GatedMLP(BaseOP):
    """`down(act(gate(x)) * up(x))`: SwiGLU with the usual activation (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, inner: int | None = None) -> None:
        """`inner` replaces the config's intermediate size."""
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, [inner, inner], config.mlp_bias)
        self.down_proj = LinearRowParallel(inner, hidden, config.mlp_bias)
        self._act = get_gated_activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]`."""
        return self.down_proj.forward(self._act(self.gate_up_proj.forward(x)))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the result without its bias, `[T, hidden]`."""
        return apply_linear(self._act(self.gate_up_proj.forward(x)), self.down_proj.weight)


class MoEMLP(BaseOP):
    """A router (`gate`) and its experts; in Qwen2-MoE also one that every token passes.

    `sum over the chosen of weight_e * expert_e(x)  +  sigmoid(shared_expert_gate(x)) * shared(x)`
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.hidden_act != "silu":  # the grouped kernels have no other
            raise UnsupportedModelError(
                f"Unsupported activation: {config.hidden_act!r} in experts; supported: silu"
            )
        self.gate = LinearReplicated(config.hidden_size, config.num_experts)
        self.experts = MoELayer(
            config.num_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
        )
        self._has_shared = config.shared_expert_intermediate_size > 0
        if self._has_shared:
            self.shared_expert = GatedMLP(config, config.shared_expert_intermediate_size)
            self.shared_expert_gate = LinearReplicated(config.hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]`."""
        shared = None
        if self._has_shared:
            share = torch.sigmoid(self.shared_expert_gate.forward(x))  # [T, 1]
            shared = share * self.shared_expert.partial(x)
        return self.experts.forward(x, self.gate.forward(x), shared)
