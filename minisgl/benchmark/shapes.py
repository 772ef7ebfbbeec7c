"""Shapes of published models, so that they can be measured where nothing can be downloaded.

Each is what a `config.json` says; weights are random (`models/random_weights.py`). `tiny` is no
published model: its vocabulary is just large enough for the reference workload's token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "write_shape"]


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama3(
    hidden: int, inner: int, layers: int, head_dim: int, scaling: float, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, 4, **_EXPERTS),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 64, 32.0, True),
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 128, 8.0, False),
    "tiny": _qwen3(64, 96, 2, 4, 2, head_dim=16, vocab_size=10_240, tie_word_embeddings=True),
}


def write_shape(name: str, folder: Path) -> None:
    """Write the shape's `config.json`, all that a model without weights and tokenizer has."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
