"""Small GGUF files of every architecture and type, written by the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 4, 2, 64, 40
EXPERTS, EXPERT_FFN, SHARED_FFN = 3, 256, 768
FILE_ARCH = {"mixtral": "llama"}
"""What files call an architecture that has no name of its own there."""
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


def encode(array: np.ndarray, kind: str) -> np.ndarray:
    """Stored bytes of `array` in type `kind`; K-quants, which gguf can't write, are random."""
    if kind == "F32":
        return array.astype(np.float32)
    if kind == "F16":
        return array.astype(np.float16)
    if kind.endswith("_K"):
        block, block_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
        shape = (*array.shape[:-1], array.shape[-1] // block * block_bytes)
        # Bytes below 60 keep every float16 scale finite.
        return np.random.default_rng(array.size).integers(0, 60, shape, dtype=np.uint8)
    return gguf.quants.quantize(array.astype(np.float32), Type[kind])


def decode(stored: np.ndarray, kind: str) -> torch.Tensor:
    """What the whole tensor means in float32, by the gguf library in one go."""
    return torch.from_numpy(np.array(gguf.quants.dequantize(stored, Type[kind]), np.float32))


def has_experts(arch: str) -> bool:
    return arch == "mixtral" or arch.endswith("moe")


def tensor_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (Q, HIDDEN),
            "attn_k.weight": (KV, HIDDEN),
            "attn_v.weight": (KV, HIDDEN),
            "attn_output.weight": (HIDDEN, Q),
        }
        if arch in ("qwen2", "qwen2moe"):
            block |= {"attn_q.bias": (Q,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)}
        if arch.startswith("qwen3"):
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        if arch == "qwen2moe":
            block |= {
                "ffn_gate_inp_shexp.weight": (HIDDEN,),  # converters drop the 1
                "ffn_gate_shexp.weight": (SHARED_FFN, HIDDEN),
                "ffn_up_shexp.weight": (SHARED_FFN, HIDDEN),
                "ffn_down_shexp.weight": (HIDDEN, SHARED_FFN),
            }
        if has_experts(arch):
            block |= {
                "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
                "ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
                "ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
                "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
            }
        else:
            block |= {
                "ffn_gate.weight": (FFN, HIDDEN),
                "ffn_up.weight": (FFN, HIDDEN),
                "ffn_down.weight": (HIDDEN, FFN),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


class Written:
    """A small GGUF file and what is in it: `stored[name] = (bytes, type name)`."""

    def __init__(
        self,
        path: Path,
        arch: str = "llama",
        kind: str = "F32",
        keys: dict[str, Any] | None = None,
        drop: tuple[str, ...] = (),
        extra: dict[str, np.ndarray] | None = None,
        kinds: dict[str, str] | None = None,
    ) -> None:
        """`kind` is the type of all matrices but those to which `kinds` gives another.

        `arch` is the file's architecture, or one of `FILE_ARCH`.
        """
        self.path = str(path)
        self.stored: dict[str, tuple[np.ndarray, str]] = {}
        writer = gguf.GGUFWriter(self.path, FILE_ARCH.get(arch, arch))
        writer.add_block_count(2)
        writer.add_context_length(1024)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_token_list([f"t{index}" for index in range(VOCAB)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if has_experts(arch):
            writer.add_expert_count(EXPERTS)
            writer.add_expert_used_count(2)
        if arch.endswith("moe"):
            writer.add_expert_feed_forward_length(EXPERT_FFN)
        if arch == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(SHARED_FFN)
        for key, value in (keys or {}).items():
            add = {
                str: writer.add_string,
                float: writer.add_float32,
                int: writer.add_uint32,
                bool: writer.add_bool,
            }
            add.get(type(value), writer.add_array)(key, value)
        rng = np.random.default_rng(0)
        arrays = {name: rng.normal(size=shape) for name, shape in tensor_shapes(arch).items()}
        arrays = {name: a for name, a in (arrays | (extra or {})).items() if name not in drop}
        for name, array in arrays.items():
            # As real files do: what is one-dimensional is never quantized.
            form = (kinds or {}).get(name, kind) if array.ndim > 1 else "F32"
            self.stored[name] = (encode(array, form), form)
            writer.add_tensor(name, self.stored[name][0], raw_dtype=Type[form])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def value(self, name: str) -> torch.Tensor:
        return decode(*self.stored[name])
