"""Which weights are kept in blocks: decided from config and header, before any is read.

    plan_storage(path, quantization, config)  ->  {"model.layers.0.self_attn.qkv_proj":
                                                      ("Q4_K", "Q4_K", "Q6_K"), ...}
    set_storage(model, storage)               the model on meta gets `QuantizedWeight`s
    load_weight(path, ..., storage=storage)   tensors under their names: "... qkv_proj.weight.0"

An op that is not named keeps an ordinary weight; so do norms, biases, the router and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from minisgl.errors import CheckpointError
from minisgl.kernel.quant import BLOCKS, quantize
from minisgl.layers import BaseOP
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
    storage = {}
    for op, width in _ops(config):
        if quantization == "keep":
            kinds = [stored.get(f"{tensor}.weight", DENSE) for tensor in _tensors(op)]
        else:
            kinds = [_FINER.get(op, _AT_LOAD[quantization])] * len(_tensors(op))
        types = tuple(
            kind if kind in BLOCKS and width % BLOCKS[kind].values == 0 else DENSE for kind in kinds
        )
        if set(types) != {DENSE}:
            storage[op] = types
    return storage


def set_storage(model: BaseOP, storage: Storage) -> None:
    """Give the ops that `storage` names a `QuantizedWeight` in place of their weight."""
    ops = dict(model.named_ops())
    for path, types in storage.items():
        op = ops[path]
        assert isinstance(op, (Linear, VocabParallelEmbedding)), path
        op.set_storage(types)


def parts_by_tensor(storage: Storage) -> dict[str, Part]:
    """For each checkpoint tensor of the ops in `storage`, its name in the model and its type."""
    return {
        f"{tensor}.weight": Part(f"{op}.weight.{index}", kind)
        for op, types in storage.items()
        for index, (tensor, kind) in enumerate(zip(_tensors(op), types, strict=True))
    }


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
                yield part.name, quantize(tensor, part.type)
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; use --quantization none") from error


def _ops(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """(path, K) of the ops that may be quantized."""
    hidden = config.hidden_size
    yield "model.embed_tokens", hidden
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.self_attn.qkv_proj", hidden
        yield f"{layer}.self_attn.o_proj", config.num_qo_heads * config.head_dim
        if not config.is_sparse(index):
            yield f"{layer}.mlp.gate_up_proj", hidden
            yield f"{layer}.mlp.down_proj", config.intermediate_size
    if not config.tie_word_embeddings:
        yield "lm_head", hidden


def _tensors(op: str) -> tuple[str, ...]:
    """The checkpoint's names for the parts of the op at this path, without `.weight`."""
    stem, dot, module = op.rpartition(".")
    return tuple(f"{stem}{dot}{part}" for part in _PARTS.get(module, (module,)))
