"""Models in one GGUF file: its config and weights, in the terms of a Hugging Face checkpoint.

`load_gguf_config` turns the file's metadata into the dict that a `config.json` would hold;
`iter_gguf_tensors` yields the weights under Hugging Face's names and in its layout. What follows
(`ModelConfig.from_hf`, sharding, merging) need not know where either came from.

Rotary pairing. Llama-type files keep the d rows of each q and k head so that a rotary pair is
two neighbours, whereas this engine (as Hugging Face) pairs row i with row i + d/2. For d = 6:

    stored    0  3  1  4  2  5      the numbers are the rows of the layout wanted:
    wanted    0  1  2  3  4  5      wanted row j of half h (j = h*d/2 + i) is stored row 2*i + h

Memory: one tensor in the target type, plus about 1 MiB of it at a time in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import CheckpointError, UnsupportedModelError
from ..kernel.quant import BLOCKS
from ..kernel.quant import dequantize as dequantize_blocks
from ..utils.gguf_header import GGUFHeader, read_gguf_header
from .gguf_names import ARCHITECTURES, ROPE_FACTORS, Metadata, Source, plan_tensors

__all__ = ["gguf_num_tensors", "gguf_tensor_types", "iter_gguf_tensors", "load_gguf_config"]

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED = frozenset(
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
_BLOCK_BYTES = 1 << 20
"""Decoded at once, in float32: small enough for a core's cache to hold what it is made of."""


def load_gguf_config(path: str) -> dict[str, Any]:
    """The `config.json` of the model in the GGUF file at `path`, made from its metadata.

    Besides the usual fields, a file with per-frequency RoPE factors (Llama 3) has
    `rope_scaling = {"rope_type": "freq_factors", "factors": [...]}`: the inverse frequencies are
    to be divided by them, one factor per pair.

    Raises ModelNotFoundError, CheckpointError (damaged file, or metadata missing or at odds with
    the tensors) and UnsupportedModelError (architecture or feature).
    """
    meta = Metadata(read_gguf_header(path))
    meta.check_supported()
    name, model_type = ARCHITECTURES[meta.arch]
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    head_dim = _head_dim(meta, heads, hidden)
    context = meta.integer("context_length")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": _num_layers(meta),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(meta),
        "max_position_embeddings": context,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, head_dim, context),
        "tie_word_embeddings": "output.weight" not in meta.shapes,
        "hidden_act": "silu",
    }
    config |= _token_ids(meta, config["vocab_size"]) | _biases(meta) | _sliding_window(meta)
    if meta.has_experts:
        config |= _experts(meta)
    if config["model_type"] in ("mistral", "mixtral") and _has_bias(meta):
        meta.refuse("biases", "a Mistral or Mixtral model, or one with a sliding window, has none")
    return config


def gguf_num_tensors(path: str) -> int:
    """How many tensors `iter_gguf_tensors(path)` yields; raises what it raises."""
    return len(_plan(read_gguf_header(path)))


def gguf_tensor_types(path: str) -> dict[str, str]:
    """The storage type of each tensor that `iter_gguf_tensors(path)` yields, by its name."""
    return {source.name: source.info.type_name for source in _plan(read_gguf_header(path))}


def iter_gguf_tensors(
    path: str,
    dtype: torch.dtype | None = None,
    blocks: Mapping[str, str] | None = None,
    skip: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(Hugging Face name, CPU tensor [out, in])`, sorted by name, one at a time.

    `dtype` is the type of every tensor yielded; with None, quantized ones become float32 and
    others keep their type. A tensor stored in that very type is a view of the mapped file
    (private: writing to it leaves the file alone). Stacked experts come one by one.

    `blocks` names tensors that are wanted in a block format, and that format: one stored in it
    comes as it is, uint8 `[out, bytes of a row]`, a view where no rows are put back in order;
    another comes as with `dtype` None, so that nothing is rounded before it is quantized. Those
    that `skip` says yes to are not read: they come on the meta device.

    The file is checked before this returns, not at the first step. Raises ModelNotFoundError,
    CheckpointError (damaged file, unknown tensor names, heads that don't divide the rows) and
    UnsupportedModelError (a tensor's storage type, naming both).
    """
    header = read_gguf_header(path)
    return _stream(header, _plan(header), dtype, blocks or {}, skip)


def _num_layers(meta: Metadata) -> int:
    """The number of layers, once the last one's tensors are known to exist.

    A damaged or hostile count would otherwise build that many layers before failing.
    """
    layers = meta.integer("block_count")
    if f"blk.{layers - 1}.attn_norm.weight" not in meta.shapes:
        raise CheckpointError(
            f"{meta.path}: {meta.arch}.block_count = {layers}, but there is no tensor "
            f"blk.{layers - 1}.attn_norm.weight; convert the model again"
        )
    return layers


def _head_dim(meta: Metadata, heads: int, hidden: int) -> int:
    """A head's size: stated, else the rotary size if the q weight agrees, else hidden / heads."""
    rotary = meta.integer("rope.dimension_count", 0, least=0)
    rows = meta.shapes.get("blk.0.attn_q.weight", (0,))[0]
    fallback = rotary if rotary and rotary * heads == rows else hidden // heads
    head_dim = meta.integer("attention.key_length", fallback)
    if rotary not in (0, head_dim):
        meta.refuse(f"rope.dimension_count = {rotary}", f"it must be the head size, {head_dim}")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        meta.refuse("value heads of another size", f"it must be the key heads' size, {head_dim}")
    return head_dim


def _vocab_size(meta: Metadata) -> int:
    """Rows of the embedding: those of its tensor, which may be padded beyond the tokens."""
    embedding = meta.shapes.get("token_embd.weight")
    if embedding is not None:
        return embedding[0]
    return meta.integer("vocab_size", meta.header.array_lengths.get("tokenizer.ggml.tokens"))


def _rope_scaling(meta: Metadata, head_dim: int, context: int) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", "linear")
    # Old files have only `scale_linear`; without any type a factor means linear.
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return _rope_factors(meta, head_dim)
    if ROPE_FACTORS in meta.shapes:
        meta.refuse(f"both {ROPE_FACTORS} and {kind} RoPE scaling", "one of them at most")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor < 1:
        meta.refuse(f"RoPE scaling {kind!r} by {factor}", "known: none, linear, yarn (from 1 up)")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer(
            "rope.scaling.original_context_length", context
        ),
    }
    # In GGUF the attention factor multiplies yarn's own; in Hugging Face's config it replaces it.
    extra = meta.number("rope.scaling.attn_factor", 1.0)
    extra *= meta.number("rope.scaling.yarn_attn_factor", 1.0)
    if extra != 1:
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1)
    for name in ("beta_fast", "beta_slow"):
        if f"{meta.arch}.rope.scaling.yarn_{name}" in meta.values:
            scaling[name] = meta.number(f"rope.scaling.yarn_{name}")
    return scaling


def _rope_factors(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    """The tensor by which inverse frequencies are divided, [head_dim / 2] float32, if any."""
    info = next((info for info in meta.header.tensors if info.name == ROPE_FACTORS), None)
    if info is None:
        return None
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{meta.path}: tensor {ROPE_FACTORS} is {info.type_name} {list(info.shape)}, not "
            f"F32 [{head_dim // 2}]; convert the model again"
        )
    data = _map(meta.header)[info.offset : info.offset + info.nbytes]
    factors = [float(value) for value in data.view("<f4")]
    if not all(math.isfinite(value) and value > 0 for value in factors):
        raise CheckpointError(
            f"{meta.path}: tensor {ROPE_FACTORS} has values that are not positive numbers; "
            "convert the model again"
        )
    return {"rope_type": "freq_factors", "factors": factors} if set(factors) != {1.0} else None


def _token_ids(meta: Metadata, vocab_size: int) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list when turns end by other ids too), `pad_token_id`."""
    ids = {name: meta.token_id(name, vocab_size) for name in ("bos", "padding")}
    ends = [meta.token_id(name, vocab_size) for name in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": distinct if len(distinct) > 1 else next(iter(distinct), None),
        "pad_token_id": ids["padding"],
    }


def _has_bias(meta: Metadata, *parts: str) -> bool:
    """Whether layer 0 has a bias in any of its projections, or in those named."""
    parts = parts or ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return any(f"blk.0.{part}.bias" in meta.shapes for part in parts)


def _biases(meta: Metadata) -> dict[str, bool]:
    """`attention_bias` and `mlp_bias`, or Qwen2-MoE's `qkv_bias`; Qwen2 has q, k and v biases
    without a field that says so."""
    if meta.arch == "qwen2":
        return {}
    flags = {}
    groups = {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    }
    if meta.arch == "qwen2moe":
        groups = {"qkv_bias": ("attn_q", "attn_k", "attn_v")}
    for flag, parts in groups.items():
        found = [part for part in parts if _has_bias(meta, part)]
        if found and len(found) < len(parts):
            meta.refuse(f"biases for {', '.join(found)} alone", f"{flag} means all of {parts}")
        flags[flag] = bool(found)
    return flags


def _sliding_window(meta: Metadata) -> dict[str, Any]:
    """The window, if any, and what makes each architecture's class apply it to every layer."""
    window = meta.integer("attention.sliding_window", 0, least=0)
    if not window:
        return {}
    config: dict[str, Any] = {"sliding_window": window}
    if meta.arch == "llama":
        # Mistral files are written as llama; its class is Llama's with a window.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    elif meta.arch == "qwen2moe":
        meta.refuse("a sliding window", "such a model has it in some layers only")
    elif meta.arch.startswith("qwen"):
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config


def _experts(meta: Metadata) -> dict[str, Any]:
    """The fields of a mixture of experts, whose count must be that of the stacked tensors."""
    experts = meta.integer("expert_count")
    stacked = meta.shapes.get("blk.0.ffn_gate_exps.weight")
    if stacked is None or len(stacked) != 3 or stacked[0] != experts:
        raise CheckpointError(
            f"{meta.path}: {meta.arch}.expert_count = {experts}, but blk.0.ffn_gate_exps.weight "
            f"has the shape {stacked}; convert the model again"
        )
    used = meta.integer("expert_used_count")
    inner = meta.integer("expert_feed_forward_length", stacked[1])
    # What files leave out is what the architecture always did: Qwen2-MoE alone takes the chosen
    # experts' probabilities as they are.
    norm = bool(meta.get("expert_weights_norm", meta.arch != "qwen2moe"))
    if meta.arch == "llama":
        if not norm:
            meta.refuse("expert_weights_norm = false", "a Mixtral model normalizes them")
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": used,
            "intermediate_size": inner,
        }
    config = {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": inner,
        "norm_topk_prob": norm,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    if meta.arch == "qwen2moe":
        rows = meta.shapes.get("blk.0.ffn_gate_shexp.weight", (None,))[0]
        shared = meta.integer("expert_shared_feed_forward_length", rows)
        config["shared_expert_intermediate_size"] = shared
    return config


def _plan(header: GGUFHeader) -> list[Source]:
    """The tensors to yield, once all can be decoded."""
    meta = Metadata(header)
    meta.check_supported()
    heads = meta.integer("attention.head_count")
    plan = plan_tensors(header, heads, meta.integer("attention.head_count_kv", heads))
    for source in plan:
        info = source.info
        rows_apart = info.type_name in _PLAIN or len(info.shape) == 2
        if info.type_name not in _PLAIN and info.type_name not in _QUANTIZED or not rows_apart:
            raise UnsupportedModelError(
                f"{header.path}: tensor {info.name} {list(info.shape)} has the storage type "
                f"{info.type_name}; supported: {', '.join(_PLAIN)}, and for matrices "
                f"{', '.join(sorted(_QUANTIZED))}"
            )
        if source.heads and info.shape[0] % (2 * source.heads):
            raise CheckpointError(
                f"{header.path}: tensor {info.name} has {info.shape[0]} rows, which "
                f"{source.heads} heads of an even size do not divide; convert the model again"
            )
    return plan


def _map(header: GGUFHeader) -> npt.NDArray[np.uint8]:
    """The file's bytes, mapped copy-on-write: torch wants writable memory, the file stays as is."""
    try:
        mapped = np.memmap(header.path, dtype=np.uint8, mode="c", shape=(header.file_bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{header.path} can't be mapped: {error}; fetch it again") from error
    return np.asarray(mapped)  # still keeps the mapping alive, and slices faster


def _stream(
    header: GGUFHeader,
    plan: list[Source],
    dtype: torch.dtype | None,
    blocks: Mapping[str, str],
    skip: Callable[[str], bool],
) -> Iterator[tuple[str, torch.Tensor]]:
    data = _map(header)
    for source in plan:
        info = source.info
        raw = data[info.offset : info.offset + info.nbytes]
        stored = _PLAIN.get(info.type_name)
        wanted = blocks.get(source.name)
        if wanted == info.type_name:
            rows = raw.reshape(info.shape[0], -1)
            order = _two_halves_order(info.shape[0], source.heads) if source.heads else None
            yield source.name, torch.from_numpy(rows if order is None else rows[order])
            continue
        target = (None if wanted else dtype) or stored or torch.float32
        if skip(source.name):
            yield source.name, torch.empty(info.shape, dtype=target, device="meta")
            continue
        if stored == target and not source.heads:
            yield source.name, torch.from_numpy(raw).view(target).view(info.shape)
            continue
        out = torch.empty(info.shape, dtype=target)
        _decode_into(out, raw.reshape(info.shape[0], -1), info.type_name, source.heads)
        yield source.name, out


def _decode_into(out: torch.Tensor, raw: npt.NDArray[np.uint8], type_name: str, heads: int) -> None:
    """Fill `out` [R, ...] from the stored rows `raw` [R, bytes of a row], block by block.

    Interleaved heads are put right by gathering the stored rows before they are decoded, so that
    every type takes the same way and is written in order.
    """
    rows = out.shape[0]
    order = _two_halves_order(rows, heads) if heads else None
    step = max(1, _BLOCK_BYTES // (4 * (out.numel() // rows)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = raw[start:stop] if order is None else raw[order[start:stop]]
        out[start:stop].copy_(_decode(block, type_name).view(stop - start, *out.shape[1:]))


def _two_halves_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """For each row of the two-halves layout, the stored row that belongs there; see the top."""
    stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    order: npt.NDArray[np.int64] = stored.swapaxes(1, 2).reshape(rows)
    return order


def _decode(block: npt.NDArray[np.uint8], type_name: str) -> torch.Tensor:
    """Stored rows [r, bytes] as numbers [r, in]: float32 if quantized, else as they are."""
    if type_name in _PLAIN:
        return torch.from_numpy(np.ascontiguousarray(block)).view(_PLAIN[type_name])
    if type_name in BLOCKS:
        return dequantize_blocks(torch.from_numpy(block), type_name)
    # Imported here: files without these types don't wait for it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(block, GGMLQuantizationType[type_name]))
