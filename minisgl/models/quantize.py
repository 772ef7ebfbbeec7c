"""Which weights are kept in blocks: decided from config and header, before any is read.

    plan_storage(path, quantization, config)  ->  {"model.layers.0.self_attn.qkv_proj":
                                                      ("Q4_K", "Q4_K", "Q6_K"), ...}
    set_storage(model, storage)               the model on meta gets `QuantizedWeight`s
    load_weight(path, ..., storage=storage)   tensors under their names: "... qkv_proj.weight.0"

An op that is not named keeps an ordinary weight; so do norms, biases and the router. The experts of
a layer are one op with two types, that of gate and up, if they have the same, and that of down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from minisgl.errors import CheckpointError
from minisgl.kernel.quant import BLOCKS, quantize
from minisgl.layers import BaseOP, MoELayer
from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.linear import Linear
from minisgl.layers.quantized import DENSE
from minisgl.utils.hf import is_gguf

from .config import ModelConfig

__all__ = ["Part", "Storage", "parts_by_tensor", "plan_storage", "quantize_parts", "set_storage"]

Storage = Mapping[str, tuple[str, ...]]
"""The types of an op's parts, in order, by the op's path; "dense" or a block format."""

_AT_LOAD = {"int8": "Q8_0", "int4": "Q4_1"}
_FINER = {"model.embed_tokens": "Q8_0", "lm_head": "Q8_0"}
"""Also with int4: all that a model reads or says goes through these."""
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class Part(NamedTuple):
    """Where a checkpoint's tensor goes, and in which type."""

    name: str
    type: str


def plan_storage(
    model_path: str, quantization: str, config: ModelConfig
) -> dict[str, tuple[str, ...]]:
    """The storage that a resolved `quantization` gives the model at `model_path`.

    none: empty. keep: each part as the GGUF file has it, if that is a block format that is
    computed with, else dense. int8, int4: Q8_0 or Q4_1 for every linear, Q8_0 for embedding
    and head, where the blocks divide the rows. An op whose parts would all be dense is left out.
    """
    if quantization == "none":
        return {}
    stored: dict[str, str] = {}
    if quantization == "keep" and is_gguf(model_path):
        from .gguf import gguf_tensor_types

        stored = gguf_tensor_types(model_path)

    def kind_of(op: str, tensors: list[str], width: int) -> str:
        kinds = {_FINER.get(op, _AT_LOAD.get(quantization, DENSE))}
        if quantization == "keep":
            kinds = {stored.get(f"{tensor}.weight", DENSE) for tensor in tensors}
        kind = kinds.pop() if len(kinds) == 1 else DENSE
        return kind if kind in BLOCKS and width % BLOCKS[kind].values == 0 else DENSE

    storage = {}
    for op, widths in _ops(config):
        parts = zip(_parts(op, config.num_experts), widths, strict=True)
        types = tuple(kind_of(op, tensors, width) for tensors, width in parts)
        if set(types) != {DENSE}:
            storage[op] = types
    return storage


def set_storage(model: BaseOP, storage: Storage) -> None:
    """Give the ops that `storage` names a `QuantizedWeight` in place of their weight, and experts
    memory for blocks."""
    ops = dict(model.named_ops())
    for path, types in storage.items():
        op = ops[path]
        assert isinstance(op, (Linear, VocabParallelEmbedding, MoELayer)), path
        op.set_storage(types)


def parts_by_tensor(storage: Storage, num_experts: int = 0) -> dict[str, Part]:
    """For each checkpoint tensor of the ops in `storage`, its name in the model and its type.

    Those of experts keep their names: they are stacked later, if the file hasn't done so.
    """
    found: dict[str, Part] = {}
    for op, types in storage.items():
        parts = zip(_parts(op, num_experts), types, strict=True)
        for index, (tensors, kind) in enumerate(parts):
            if op.endswith(".experts"):
                names = [f"{tensor}.weight" for tensor in tensors]
                names.append(f"{op}.{('gate_up_proj', 'down_proj')[index]}")
                found |= {name: Part(name, kind) for name in names}
            else:
                found[f"{tensors[0]}.weight"] = Part(f"{op}.weight.{index}", kind)
    return found


def quantize_parts(
    tensors: Iterator[tuple[str, torch.Tensor]], parts: Mapping[str, Part]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of `parts` under their new names, in blocks unless they are so already."""
    for name, tensor in tensors:
        part = parts.get(name)
        if part is None:
            yield name, tensor
        elif part.type == DENSE or tensor.dtype == torch.uint8:
            yield part.name, tensor
        else:
            try:
                rows = quantize(tensor.flatten(0, -2), part.type)
                yield part.name, rows.unflatten(0, tensor.shape[:-1])
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; use --quantization none") from error


def _ops(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(path, K of each part) of the ops that may be quantized."""
    hidden = config.hidden_size
    yield "model.embed_tokens", (hidden,)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.self_attn.qkv_proj", (hidden,) * 3
        yield f"{layer}.self_attn.o_proj", (config.num_qo_heads * config.head_dim,)
        mlp, inner = f"{layer}.mlp", config.intermediate_size
        if config.is_sparse(index):
            yield f"{mlp}.experts", (hidden, config.moe_intermediate_size)
            mlp, inner = f"{mlp}.shared_expert", config.shared_expert_intermediate_size
        if inner:
            yield f"{mlp}.gate_up_proj", (hidden,) * 2
            yield f"{mlp}.down_proj", (inner,)
    if not config.tie_word_embeddings:
        yield "lm_head", (hidden,)


def _parts(op: str, num_experts: int) -> list[list[str]]:
    """The checkpoint's tensors, without `.weight`, of each part of the op at this path."""
    stem, dot, module = op.rpartition(".")
    if module == "experts":
        experts = [f"{op}.{expert}" for expert in range(num_experts)]
        gate_up = [f"{expert}.{part}" for expert in experts for part in _PARTS["gate_up_proj"]]
        return [gate_up, [f"{expert}.down_proj" for expert in experts]]
    return [[f"{stem}{dot}{part}"] for part in _PARTS.get(module, (module,))]
