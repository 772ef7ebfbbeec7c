"""A loaded decoder, handed over to the native CPU kernels.

`NativeModel(model)` takes each op's weights, brings them into the kernels' layout and leaves empty
tensors (on the meta device) in their place: names and shapes stay, the memory is the packed one's.
It computes what `CausalLM.forward` does, in one call a step:

    forward(batch)      all layers, for all tokens of the batch; keys and values into the pool
    logits(rows)        of these rows of the batch, `[n, V]` float32
    greedy(rows)        only the most likely token of each
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch

from minisgl.core import Batch
from minisgl.kernel.cpu import (
    NATIVE_TYPES,
    PackedExperts,
    PackedWeight,
    ThreadPool,
    library,
    linear_struct,
    pack_weight,
    structs,
)
from minisgl.kernel.cpu.pool import free_with
from minisgl.kvcache import KVPool
from minisgl.layers import MoELayer
from minisgl.layers.linear import Linear
from minisgl.layers.quantized import DENSE, QuantizedWeight, WeightPart
from minisgl.utils.memory import Arena

from .config import ModelConfig
from .decoder import CausalLM, DecoderLayer
from .utils import GatedMLP, MoEMLP

__all__ = ["NativeModel"]

_ACTS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class NativeModel:
    """The weights of a decoder in the kernels' layout, and the calls that compute it."""

    def __init__(
        self, model: CausalLM, config: ModelConfig, dtype: torch.dtype, threads: int
    ) -> None:
        """`dtype` (float32 or bfloat16) is what attention multiplies in; weights have their own."""
        self._native = library()
        self._pool = ThreadPool(threads)
        self._config = config
        self._dtype = dtype
        self._arena = Arena()
        self._kept: list[object] = []  # memory that structs point to
        self.weight_bytes = 0
        """Of all weights that a step reads, if every expert is chosen."""
        self._embedding, self._head = self._take_vocabulary(model)
        self._layers = [self._take_layer(i, layer) for i, layer in enumerate(model.model.layers)]
        self._final_norm = self._floats(model.model.norm.weight)
        rope = model.model.layers[0].self_attn.attn.rotary
        self._rope = self._floats(rope._cos_sin_cache)
        self._logit_size = config.vocab_size

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Connect to the engine's memory: `page_table`, `token_pool` int32, a row a request."""
        layers = (structs.Layer * len(self._layers))(*self._layers)
        for i, layer in enumerate(layers):
            keys, values = pool.pages(i)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            if pool.scales is not None:
                layer.key_scales = pool.scales[0, i].data_ptr()
                layer.value_scales = pool.scales[1, i].data_ptr()
        config = self._config
        sizes = structs.Sizes(
            layers=len(layers),
            hidden=config.hidden_size,
            q_heads=config.num_qo_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            rotary=config.rotary_config.rotary_dim,
            act=_ACTS[config.hidden_act],
            kv_type=_KV_TYPES[pool.data.dtype],
            page_size=pool.shape.page_size,
            compute=NATIVE_TYPES[self._dtype],
            eps=config.rms_norm_eps,
            attention_scale=1 / math.sqrt(config.head_dim),
            rope=self._rope,
            final_norm=self._final_norm,
            embedding=self._embedding,
            head=self._head,
            layer=layers,
        )
        self._native.minisgl_model.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(self._native.minisgl_model(ctypes.byref(sizes)))
        free_with(self, self._native.minisgl_model_free, self._handle)
        self._bound = pool, page_table, token_pool  # the kernels read and write their memory
        self._step = structs.Step(
            tokens=token_pool.data_ptr(),
            token_stride=token_pool.stride(0),
            pages=page_table.data_ptr(),
            page_stride=page_table.stride(0),
        )
        self._step_pointer = ctypes.byref(self._step)

    def forward(self, batch: Batch) -> None:
        """Compute all layers for the batch's tokens, which the token pool holds."""
        step = self._step
        step.count = batch.size
        step.rows, step.cached, step.lengths = map(
            _address, (batch.rows, batch.cached_lens, batch.device_lens)
        )
        self._native.minisgl_forward(self._handle, self._pool.handle, self._step_pointer)

    def logits(self, rows: np.ndarray) -> torch.Tensor:
        """Of rows `[n]` int64 of the last forward's tokens: `[n, vocab]` float32."""
        out = torch.empty(len(rows), self._logit_size)
        self._project(rows, out.data_ptr(), None)
        return out

    def greedy(self, rows: np.ndarray) -> torch.Tensor:
        """The most likely token of rows `[n]`, the lowest id among equals: `[n]` int64."""
        best = torch.empty(len(rows), dtype=torch.int64)
        self._project(rows, None, best.data_ptr())
        return best

    def _project(self, rows: np.ndarray, logits: int | None, best: int | None) -> None:
        self._native.minisgl_project(
            self._handle,
            self._pool.handle,
            ctypes.c_void_p(_address(rows)),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(logits),
            ctypes.c_int64(self._logit_size),
            ctypes.c_void_p(best),
        )

    # -- taking weights over ---------------------------------------------------------------

    def _take_vocabulary(self, model: CausalLM) -> tuple[structs.Weight, structs.Linear]:
        embedding, head = model.model.embed_tokens, model.lm_head
        [table] = self._pack(embedding.weight, (embedding.vocab_size,))
        embedding.weight = _emptied(embedding.weight)
        if head._tied is not None:
            self.weight_bytes += table.data.nbytes
            return table.struct(), linear_struct([table])
        [projection] = self._pack(head.weight, (head.vocab_size,))
        head.weight = _emptied(head.weight)
        self.weight_bytes += projection.data.nbytes
        return table.struct(), linear_struct([projection])

    def _take_layer(self, index: int, layer: DecoderLayer) -> structs.Layer:
        attention = layer.self_attn
        qk_norm = attention.attn.q_norm is not None
        return structs.Layer(
            input_norm=self._floats(layer.input_layernorm.weight),
            post_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(attention.q_norm.weight) if qk_norm else None,
            k_norm=self._floats(attention.k_norm.weight) if qk_norm else None,
            qkv=self._take_linear(attention.qkv_proj),
            o=self._take_linear(attention.o_proj),
            window=self._config.layer_window(index) or 0,
            **self._take_mlp(layer.mlp),
        )

    def _take_mlp(self, mlp: GatedMLP | MoEMLP) -> dict[str, Any]:
        if isinstance(mlp, MoEMLP):
            experts = ctypes.pointer(self._take_experts(mlp).struct())
            self._kept.append(experts)
            return {"experts": experts}
        return {
            "gate_up": self._take_linear(mlp.gate_up_proj),
            "down": self._take_linear(mlp.down_proj),
        }

    def _take_experts(self, mlp: MoEMLP) -> PackedExperts:
        router = self._take_parts(mlp.gate)
        gate_up = self._take_stacked(mlp.experts, "gate_up_proj", 2)
        down = self._take_stacked(mlp.experts, "down_proj", 1)
        if mlp._has_shared:
            router += self._take_parts(mlp.shared_expert_gate)
            gate_up.append(self._take_parts(mlp.shared_expert.gate_up_proj))
            down.append(self._take_parts(mlp.shared_expert.down_proj))
        flat = [weight for [weight] in down]
        return PackedExperts(router, gate_up, flat, mlp.experts.top_k, mlp.experts.renormalize)

    def _take_stacked(self, op: MoELayer, name: str, parts: int) -> list[list[PackedWeight]]:
        """Of each expert the parts, side by side, of the weights `[E, parts * n, k]` of this name.

        A layer's memory is let go once its last expert is packed.
        """
        stacked = getattr(op, name)
        rows = (stacked.shape[1] // parts,) * parts
        kind = op.types[name]
        packed = [
            self._pack_parts([WeightPart(kind, part) for part in weight.split(rows)])
            for weight in stacked
        ]
        self.weight_bytes += sum(part.data.nbytes for each in packed for part in each)
        setattr(op, name, _emptied(stacked))
        return packed

    def _take_linear(self, op: Linear) -> structs.Linear:
        bias = self._floats(op.bias) if op._has_bias else None
        return linear_struct(self._take_parts(op), bias)

    def _take_parts(self, op: Linear) -> list[PackedWeight]:
        packed = self._pack(op.weight, op.part_rows)
        op.weight = _emptied(op.weight)
        self.weight_bytes += sum(part.data.nbytes for part in packed)
        return packed

    def _pack(
        self, weight: torch.Tensor | QuantizedWeight, rows: tuple[int, ...]
    ) -> list[PackedWeight]:
        """One for each projection that was merged into the weight."""
        if isinstance(weight, torch.Tensor):
            parts = [WeightPart(DENSE, part) for part in weight.split(list(rows))]
        else:
            parts = weight.parts
        return self._pack_parts(parts)

    def _pack_parts(self, parts: list[WeightPart]) -> list[PackedWeight]:
        packed = []
        for kind, tensor in parts:
            name = None if kind == DENSE else kind
            packed.append(pack_weight(self._pool, tensor, name, self._arena))
        self._kept += [part.data for part in packed]
        return packed

    def _floats(self, tensor: torch.Tensor) -> int:
        kept = tensor.float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _emptied(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
    """The same without memory."""
    if isinstance(weight, torch.Tensor):
        return weight.to("meta")
    for name, tensor in list(weight._weights()):
        weight._replace(name, tensor.to("meta"))
    return weight


def _address(array: np.ndarray) -> int:
    # `array.ctypes.data` makes objects first: this takes a third of the time.
    address: int = array.__array_interface__["data"][0]
    return address
