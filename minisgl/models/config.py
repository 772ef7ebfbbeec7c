"""`ModelConfig`: what of a Hugging Face config the engine needs, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.errors import UnsupportedModelError
from minisgl.layers.rotary import max_context, rope_type

__all__ = ["ModelConfig", "RotaryConfig"]


@dataclass(frozen=True)
class RotaryConfig:
    """Parameters of `get_rope`."""

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    scaling: Mapping[str, Any] | None = None

    @property
    def max_context(self) -> int:
        """Positions the table covers, stretched contexts included."""
        return max_context(self.max_position, self.scaling)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, independent of how a config file spells it."""

    architectures: tuple[str, ...]
    model_type: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    rotary_config: RotaryConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have a bias."""
    output_bias: bool = False
    """o has a bias."""
    mlp_bias: bool = False
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window - 1` before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers that ignore the sliding window (Qwen's `layer_types` or `max_window_layers`)."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a `transformers` config object, or any object with a `config.json`'s fields.

        Both layouts of RoPE are read: `rope_parameters` (transformers 5) and the pair
        `rope_theta`, `rope_scaling` (4.x). Missing optional fields take Hugging Face's
        defaults. Raises `UnsupportedModelError` naming a missing or contradictory field.
        """
        hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        # Explicit and not hidden / heads in Qwen3; absent or null elsewhere.
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads = {heads} is not a multiple of "
                f"num_key_value_heads = {kv_heads}"
            )
        architectures = tuple(getattr(config, "architectures", None) or ())
        return cls(
            architectures=architectures,
            model_type=_need(config, "model_type"),
            num_layers=_need(config, "num_hidden_layers"),
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=_need(config, "vocab_size"),
            intermediate_size=_need(config, "intermediate_size"),
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rotary_config=_rotary(config, head_dim),
            hidden_act=getattr(config, "hidden_act", None) or "silu",
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            eos_token_ids=token_ids(getattr(config, "eos_token_id", None)),
            **_biases(config),
            **_window(config),
            **_experts(config),
        )

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(self.is_sparse(i) for i in range(self.num_layers))

    def is_sparse(self, layer_id: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return (
            self.num_experts > 0
            and layer_id not in self.mlp_only_layers
            and (layer_id + 1) % self.decoder_sparse_step == 0
        )

    def layer_window(self, layer_id: int) -> int | None:
        """The sliding window of this layer, None for full attention."""
        return None if layer_id in self.full_attention_layers else self.sliding_window

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's token id field, which may be a number, a list or null, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _need(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise UnsupportedModelError(f"The model's config has no {name!r}")
    return value


def _rotary(config: Any, head_dim: int) -> RotaryConfig:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    scaling = parameters or dict(getattr(config, "rope_scaling", None) or {})
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    partial = scaling.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    scaling = {k: v for k, v in scaling.items() if k not in ("rope_theta", "partial_rotary_factor")}
    max_position = _need(config, "max_position_embeddings")
    return RotaryConfig(
        head_dim=head_dim,
        rotary_dim=int(head_dim * (partial or 1.0)),
        max_position=max_position,
        base=float(base),
        scaling=None if rope_type(scaling) == "default" else scaling,
    )


def _biases(config: Any) -> dict[str, Any]:
    if config.model_type == "qwen2":  # its config has no field for the bias it always has
        return {"attention_bias": True, "output_bias": False, "mlp_bias": False}
    bias = bool(getattr(config, "attention_bias", False))
    return {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
    }


def _window(config: Any) -> dict[str, Any]:
    window = getattr(config, "sliding_window", 4096)  # absent is not null: the classes' default
    if config.model_type == "mistral":
        return {"sliding_window": window}
    if config.model_type.startswith("qwen") and getattr(config, "use_sliding_window", False):
        return {"sliding_window": window, "full_attention_layers": _full_layers(config)}
    return {}


def _full_layers(config: Any) -> tuple[int, ...]:
    """Qwen's layers without a window: named one by one, or the first `max_window_layers`."""
    if config.model_type.endswith("_moe"):  # there every layer has the window
        return ()
    types = getattr(config, "layer_types", None)
    if types is None:
        return tuple(range(getattr(config, "max_window_layers", 28)))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"Unsupported layer_types: {sorted(unknown)}")
    return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def _experts(config: Any) -> dict[str, Any]:
    # transformers 5 writes num_local_experts, the published configs have num_experts.
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not num_experts:
        return {}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": _need(config, "num_experts_per_tok"),
        "moe_intermediate_size": _need(config, "moe_intermediate_size"),
        "norm_topk_prob": bool(getattr(config, "norm_topk_prob", False)),
        "mlp_only_layers": tuple(getattr(config, "mlp_only_layers", None) or ()),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", None) or 1,
    }
