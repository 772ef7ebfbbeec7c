"""`ModelConfig`: what of a Hugging Face config the engine needs, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.layers.rotary import max_context, rope_type

from .fields import MAX_SIZE, Fields, bad_field, shown

__all__ = ["ModelConfig", "RotaryConfig", "token_ids"]

_MAX_LAYERS = 10_000
_MIXTRAL = "mixtral"


@dataclass(frozen=True)
class RotaryConfig:
    """Parameters of `get_rope`."""

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float
    scaling: Mapping[str, Any] | None = None
    table_length: int | None = None
    """Rows of the table when fewer positions are used than `max_context`."""

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
    shared_expert_intermediate_size: int = 0
    """Of the expert that every token passes, weighted by a gate of its own; 0: there is none."""
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Read a `transformers` config object, or any object with a `config.json`'s fields.

        Both layouts of RoPE are read: `rope_parameters` (transformers 5) and the pair
        `rope_theta`, `rope_scaling` (4.x). Missing optional fields take Hugging Face's
        defaults. Raises `UnsupportedModelError` naming a field that is missing, contradicts
        another, or has a value of a wrong type or out of range.
        """
        fields = Fields(config)
        _refuse_quantized(fields)
        hidden = fields.integer("hidden_size")
        heads, kv_heads, head_dim = _heads(fields, hidden)
        model_type = fields.text("model_type")
        num_layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
        return cls(
            architectures=fields.texts("architectures"),
            model_type=model_type,
            num_layers=num_layers,
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=fields.integer("vocab_size"),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number(
                "rms_norm_eps", 0, 1, default=1e-5 if model_type == _MIXTRAL else 1e-6, ends="[)"
            ),
            rotary_config=_rotary(fields, head_dim, 1e6 if model_type == _MIXTRAL else 1e4),
            hidden_act=fields.text("hidden_act", "silu"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            eos_token_ids=token_ids(fields.get("eos_token_id"), "eos_token_id of the config"),
            **_biases(fields, model_type),
            **_window(config, fields, model_type, num_layers),
            **_experts(fields, model_type),
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
        """Bytes of keys and values that one token takes over all layers and heads.

        In int8 each head of them has a scale of 4 bytes.
        """
        scale_bytes = 4 if dtype == torch.int8 else 0
        vectors = 2 * self.num_layers * self.num_kv_heads
        return vectors * (self.head_dim * dtype.itemsize + scale_bytes)


def token_ids(value: object, field: str = "eos_token_id") -> tuple[int, ...]:
    """A token id field, which may be a number, a list or null, as a tuple.

    -1, by which some files say "none", is left out. Anything else is a `CheckpointError` that
    calls the value `field`.
    """
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < -1:
            raise CheckpointError(
                f"{field} = {shown(value)} must be null, a token id (an integer of at least 0; "
                "-1 means none), or a list of them"
            )
    return tuple(item for item in ids if item >= 0)


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads, and the size of each."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    # Explicit and not hidden / heads in Qwen3; absent or null elsewhere.
    head_dim = fields.integer("head_dim", 2, default=hidden // heads)
    if head_dim % 2:
        raise bad_field("head_dim", head_dim, "even: RoPE turns pairs of dimensions")
    return heads, kv_heads, head_dim


def _refuse_quantized(fields: Fields) -> None:
    """Folders quantized by GPTQ, AWQ, FP8, ...: their tensors are not the model's weights."""
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UnsupportedModelError(
            f"The model's config has quantization_config = {shown(method or quantization)}: "
            "quantized safetensors are not supported; use the original weights or a GGUF file"
        )


# -- RoPE ----------------------------------------------------------------------------------

_ORIGINAL = "original_max_position_embeddings"
# Of each type the fields that it must have, and those that it may have.
_SCALING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), (_ORIGINAL,)),
    "dynamic": ((), ("factor", _ORIGINAL)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (
        (),
        ("factor", _ORIGINAL, "attention_factor", "truncate")
        + ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "freq_factors": (("factors",), ()),
}


def _rotary(fields: Fields, head_dim: int, default_base: float) -> RotaryConfig:
    field = "rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling"
    raw = fields.mapping(field)
    inner = Fields(raw, f"{field}.")
    for name, value in raw.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"The model's config: {inner.name(name)} = {shown(value)}: RoPE that differs by "
                "layer type is not supported, only one for all layers"
            )

    def holder(name: str) -> Fields:
        return fields if inner.get(name) is None else inner

    partial = holder("partial_rotary_factor").number(
        "partial_rotary_factor", 0, 1, default=1.0, ends="(]"
    )
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not rotary_dim:
        why = f"such that it times head_dim = {head_dim} is even and at least 2"
        raise bad_field("partial_rotary_factor", partial, why)
    rotary = RotaryConfig(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        max_position=fields.integer("max_position_embeddings"),
        # Above 1: yarn divides by its logarithm. The table is float32, hence an upper end.
        base=holder("rope_theta").number("rope_theta", 1, 1e30, default=default_base, ends="(]"),
        scaling=_scaling(raw, inner, rotary_dim),
    )
    if rotary.max_context > MAX_SIZE:
        raise bad_field(field, raw, f"such that the context is at most {MAX_SIZE} tokens")
    return rotary


def _scaling(raw: Mapping[str, Any], fields: Fields, rotary_dim: int) -> dict[str, Any] | None:
    """The scaling's type under "rope_type", and of its fields those that the type reads."""
    kind = rope_type(raw)
    if kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    needed, optional = _SCALING[kind]
    for name in needed + optional:
        if name in needed or fields.get(name) is not None:
            scaling[name] = _scaling_field(fields, name)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        high = fields.name("high_freq_factor")
        why = f"above low_freq_factor = {scaling['low_freq_factor']:g}"
        raise bad_field(high, scaling["high_freq_factor"], why)
    if kind == "freq_factors" and len(scaling["factors"]) != rotary_dim // 2:
        count = f"{rotary_dim // 2} numbers, one for each pair of dimensions"
        raise bad_field(fields.name("factors"), scaling["factors"], count)
    return scaling


def _scaling_field(fields: Fields, name: str) -> Any:
    """One of the fields in `_SCALING`, within bounds that keep the float32 table finite."""
    if name == _ORIGINAL:
        return fields.integer(name)
    if name == "truncate":
        return fields.flag(name)
    if name == "factors":  # some files turn a frequency off by 1e30
        return fields.numbers(name, 1e-3, 1e35)
    if name.startswith(("beta", "mscale")):  # 0 is the default, as in Hugging Face
        return fields.number(name, 0, 1e6)
    return fields.number(name, 1e-3, 1e6)


# -- biases, windows, experts --------------------------------------------------------------


def _biases(fields: Fields, model_type: str) -> dict[str, Any]:
    if model_type == "qwen2":  # its config has no field for the bias it always has
        return {"attention_bias": True, "output_bias": False, "mlp_bias": False}
    if model_type == "qwen2_moe":
        qkv_bias = fields.flag("qkv_bias", True)
        return {"attention_bias": qkv_bias, "output_bias": False, "mlp_bias": False}
    if model_type == _MIXTRAL:
        return {}
    bias = fields.flag("attention_bias")
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias")}


def _window(config: Any, fields: Fields, model_type: str, num_layers: int) -> dict[str, Any]:
    on_all_layers = model_type in ("mistral", _MIXTRAL)
    if not on_all_layers and not (
        model_type.startswith("qwen") and fields.flag("use_sliding_window")
    ):
        return {}
    # Absent is not null: the classes' default.
    window: int | None = None if model_type == _MIXTRAL else 4096
    if hasattr(config, "sliding_window"):
        null = fields.get("sliding_window") is None
        window = None if null else fields.integer("sliding_window")
    if on_all_layers:
        return {"sliding_window": window}
    full = _full_layers(fields, model_type, num_layers)
    return {"sliding_window": window, "full_attention_layers": full}


def _full_layers(fields: Fields, model_type: str, num_layers: int) -> tuple[int, ...]:
    """Qwen's layers without a window: named one by one, or the first `max_window_layers`."""
    if model_type == "qwen3_moe":  # there every layer has the window
        return ()
    types = fields.texts("layer_types")
    if not types:
        limit = fields.integer("max_window_layers", 0, default=28)
        if model_type == "qwen2_moe":  # every second layer below the limit has it
            return tuple(i for i in range(num_layers) if i % 2 or i >= limit)
        return tuple(range(min(limit, num_layers)))
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"Unsupported layer_types: {sorted(unknown)}")
    if len(types) != num_layers:
        why = f"one for each of num_hidden_layers = {num_layers}, not {len(types)}"
        raise bad_field("layer_types", types, why)
    return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def _experts(fields: Fields, model_type: str) -> dict[str, Any]:
    # transformers 5 writes num_local_experts, Qwen's published configs have num_experts.
    num_experts = fields.integer("num_experts", 0, default=0)
    if not num_experts:
        default = None if model_type == _MIXTRAL else 0
        num_experts = fields.integer("num_local_experts", 0, default=default)
    if not num_experts:
        return {}
    experts: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.integer("num_experts_per_tok", 1, num_experts),
    }
    if model_type == _MIXTRAL:  # all MLPs have experts, and weights are always normalized
        inner = fields.integer("intermediate_size")
        return {**experts, "moe_intermediate_size": inner, "norm_topk_prob": True}
    experts |= {
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "mlp_only_layers": fields.integers("mlp_only_layers"),
        "decoder_sparse_step": fields.integer("decoder_sparse_step", default=1),
    }
    if model_type == "qwen2_moe":
        name = "shared_expert_intermediate_size"
        experts[name] = fields.integer(name)
    return experts
