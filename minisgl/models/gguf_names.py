"""What GGUF files call a model's metadata and tensors, against Hugging Face's names.

    token_embd.weight            -> model.embed_tokens.weight
    blk.3.attn_q.bias            -> model.layers.3.self_attn.q_proj.bias
    blk.3.ffn_up_exps.weight     -> model.layers.3.mlp.experts.{0 .. E-1}.up_proj.weight
                                    (Mixtral's too: these names are what its own become anyway)
    rope_freqs.weight            -> none: it is part of the config, see `gguf.py`

Source of the names: ggml's `docs/gguf.md` and the constants of the `gguf` library.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from ..utils.gguf_header import GGML_TYPES, GGUFHeader, GGUFTensorInfo

__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "Metadata", "Source", "plan_tensors"]

# general.architecture -> (class name in `architectures`, `model_type`); llama with experts is
# Mixtral
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
# Their q and k rows are stored so that rotary pairs are neighbours.
_INTERLEAVED = frozenset({"llama", "mistral", "mistral3"})
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe")
ROPE_FACTORS = "rope_freqs.weight"

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


# Keys that change the computation in ways no supported architecture has, and the values that
# leave it alone: better to refuse than to compute something else.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (0,),
}


class Metadata:
    """Typed access to one file's metadata; keys are given without the architecture's prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.path = header.path
        self.values = header.metadata
        self.shapes = {info.name: info.shape for info in header.tensors}
        self.arch = str(self.values.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path}: general.architecture = {self.arch!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    def check_supported(self) -> None:
        """Refuse what the supported architectures can't express."""
        for key, neutral in _NEUTRAL.items():
            value = self.values.get(f"{self.arch}.{key}", neutral[0])
            if value not in neutral:
                self.refuse(f"{self.arch}.{key} = {value!r}", "it must be absent")
        if self.arch not in _WITH_EXPERTS and self.integer("expert_count", 0, least=0) > 0:
            self.refuse("experts", f"only files of {', '.join(_WITH_EXPERTS)} may have them")
        if self.values.get("split.count", 1) not in (0, 1):
            self.refuse("several files (split.count > 1)", "merge them into one first")

    @property
    def has_experts(self) -> bool:
        """Whether its MLPs are mixtures of experts."""
        return self.arch.endswith("moe") or self.integer("expert_count", 0, least=0) > 0

    def refuse(self, what: str, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.path}: a GGUF file of architecture {self.arch!r} with {what} is not "
            f"supported: {why}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """A value that must be there; an array with one value for all layers is that value."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks the metadata {self.arch}.{key}; convert the model again"
            )
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                self.refuse(f"{self.arch}.{key} = {value[:8]}", "layers must be alike")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(
                f"{self.path}: {self.arch}.{key} = {value!r} must be an integer of at least "
                f"{least}; convert the model again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float. Files keep float32: 9.999999747378752e-06 was 1e-05 before it was stored."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise CheckpointError(
                f"{self.path}: {self.arch}.{key} = {self.get(key, default)!r} must be a finite "
                "number that is not negative; convert the model again"
            )
        return _as_meant(float(value))

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """`tokenizer.ggml.{name}_token_id`; None if absent or beyond the vocabulary."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.{name}_token_id = {value!r} must be an integer; "
                "convert the model again"
            )
        return value if value is not None and 0 <= value < vocab_size else None


def _as_meant(value: float) -> float:
    """The shortest decimal that rounds to the same float32; other doubles stay as they are."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if float(single) == value else value


class Source(NamedTuple):
    """One tensor to yield: its Hugging Face name, and the stored bytes that it comes from.

    `info.shape` is the shape to yield. `heads` is 0, or the number of heads whose rows are to be
    put back from the interleaved order.
    """

    name: str
    info: GGUFTensorInfo
    heads: int


def plan_tensors(header: GGUFHeader, num_heads: int, num_kv_heads: int) -> list[Source]:
    """Every tensor of the file under its Hugging Face name, sorted by that name.

    Stacked experts `[E, out, in]` become E tensors `[out, in]`. Raises CheckpointError for names
    that are not known (naming them) and for stacked experts that aren't three-dimensional.
    """
    interleaved = header.metadata.get("general.architecture") in _INTERLEAVED
    heads_of = {"attn_q": num_heads, "attn_k": num_kv_heads} if interleaved else {}
    sources: list[Source] = []
    unknown: list[str] = []
    for info in header.tensors:
        match = _LAYER_NAME.fullmatch(info.name)
        if info.name in _GLOBAL:
            sources.append(Source(_GLOBAL[info.name], info, 0))
        elif match and match[2] in _LAYER:
            name = f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
            if match[2] == "ffn_gate_inp_shexp" and len(info.shape) == 1:  # it has one output
                info = info._replace(shape=(1, *info.shape))
            sources.append(Source(name, info, heads_of.get(match[2], 0)))
        elif match and match[2] in _EXPERTS and match[3] == "weight":
            sources += _split_experts(header, info, match[1], _EXPERTS[match[2]])
        elif info.name != ROPE_FACTORS:
            unknown.append(info.name)
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise CheckpointError(
            f"{header.path} has tensors that no supported model has: "
            f"{', '.join(unknown[:8])}{more}; use a file of a supported architecture "
            f"({', '.join(ARCHITECTURES)})"
        )
    return sorted(sources)


def _split_experts(
    header: GGUFHeader, info: GGUFTensorInfo, layer: str, projection: str
) -> list[Source]:
    """The experts' slices of a stacked tensor; each is contiguous in the file."""
    if len(info.shape) != 3:
        raise CheckpointError(
            f"{header.path}: tensor {info.name} has the shape {info.shape}, not "
            "[experts, out, in]; convert the model again"
        )
    experts, *shape = info.shape
    form = GGML_TYPES[info.type]
    nbytes = shape[0] * shape[1] // form.block * form.block_bytes
    return [
        Source(
            f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight",
            info._replace(shape=tuple(shape), offset=info.offset + expert * nbytes, nbytes=nbytes),
            0,
        )
        for expert in range(experts)
    ]
