"""Mixtures of experts in GGUF files compute what `transformers` computes with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.helpers import (
    LOGIT_ATOL,
    TINY,
    assert_close,
    engine_logits,
    hf_logits,
    make_engine,
    random_prompts,
    tiny_hf_model,
)

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2moe": (
        "qwen2_moe",
        {**MOE, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    ),
    "llama": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + d/2 of each head one after the other, as llama files have them."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def file_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The weights of a `transformers` model under the file's names."""
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    tensors: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if name in GLOBAL:
            tensors[GLOBAL[name]] = weight.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        block = f"blk.{layer}"
        if rest == "mlp.experts.gate_up_proj":
            gate, up = weight.chunk(2, dim=1)
            tensors[f"{block}.ffn_gate_exps.weight"] = gate.numpy()
            tensors[f"{block}.ffn_up_exps.weight"] = up.numpy()
        elif rest == "mlp.experts.down_proj":
            tensors[f"{block}.ffn_down_exps.weight"] = weight.numpy()
        else:
            module, kind = rest.rsplit(".", 1)
            part, array = LAYER[module], weight.numpy()
            if arch == "llama" and part in heads:
                array = neighbours(array, heads[part])
            if part == "ffn_gate_inp_shexp":
                array = array[0]
            tensors[f"{block}.{part}.{kind}"] = array
    return tensors


def write(model: Any, arch: str, path: Path) -> str:
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    if arch == "qwen3moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, array in file_tensors(model, arch).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("arch", MODELS)
def test_logits_equal_transformers(arch: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[arch]
    model = tiny_hf_model(model_type, **changes)
    path = write(model, arch, tmp_path / "m.gguf")
    prompt = random_prompts([40], TINY["vocab_size"], seed=7)[0]
    engine = make_engine(path, dtype="float32", num_pages=8, threads=1)
    ours = engine_logits(engine, prompt, range(40), chunk=16)
    engine.close()
    assert_close(ours, hf_logits(model, prompt, range(40)), LOGIT_ATOL)
