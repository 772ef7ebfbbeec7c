"""`tools/make_checkpoint.py` writes what transformers reads, whatever the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_checkpoint import CHUNK, make_checkpoint, tensor_shapes

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    """A published config with its sizes shrunk."""
    config = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return {**config, **TINY, **changes}


# Neither is among the published configs here: what makes them of their dense kin's.
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
ARCHITECTURES = {
    "llama": tiny("llama-3.2-1b-instruct", head_dim=8),
    "llama-biased": tiny("llama-3.2-1b-instruct", head_dim=8, attention_bias=True, mlp_bias=True),
    "llama-untied": tiny("llama-3.1-8b-instruct"),
    "mistral": tiny("mistral-7b-v0.1"),
    "qwen2": tiny("qwen2.5-0.5b-instruct"),
    "qwen3": tiny("qwen3-0.6b", head_dim=16),
    "qwen3-biased": tiny("qwen3-0.6b", head_dim=16, attention_bias=True),
    "qwen3-moe": tiny("qwen3-30b-a3b", head_dim=16, num_experts=4, num_experts_per_tok=2,
                      moe_intermediate_size=16),
    "qwen3-moe-mixed": tiny("qwen3-30b-a3b", head_dim=16, num_experts=4, num_experts_per_tok=2,
                            moe_intermediate_size=16, mlp_only_layers=[2], decoder_sparse_step=2),
    "qwen2-moe": tiny("qwen2.5-0.5b-instruct", **QWEN2_MOE),
    "qwen2-moe-mixed": tiny("qwen2.5-0.5b-instruct", **QWEN2_MOE, qkv_bias=False,
                            mlp_only_layers=[2], decoder_sparse_step=2),
    "mixtral": tiny("mistral-7b-v0.1", **MIXTRAL),
}  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_finds_every_key_and_no_other(name: str, tmp_path: Path) -> None:
    make_checkpoint(ARCHITECTURES[name], tmp_path, dtype="float32")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    written = weights(tmp_path)
    norm = model.model.layers[1].input_layernorm.weight
    torch.testing.assert_close(
        norm, written["model.layers.1.input_layernorm.weight"], rtol=0, atol=0, check_dtype=False
    )
    assert model.generation_config.eos_token_id == [2, 3]
    logits = model(torch.tensor([[1, 5, 9]])).logits
    assert logits.shape == (1, 3, 131)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe-mixed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shards_hold_the_same_values_as_one_file(name: str, dtype: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    one = make_checkpoint(config, tmp_path / "one", dtype=dtype)
    many = make_checkpoint(config, tmp_path / "many", dtype=dtype, max_shard_bytes=12_000)
    whole, split = weights(one), weights(many)
    assert list(whole) == list(split) == list(tensor_shapes(config))
    for key, tensor in whole.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, split[key]), key
    index = json.loads((many / "model.safetensors.index.json").read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(file.name for file in many.glob("*.safetensors"))
    for key, file in index["weight_map"].items():
        with safe_open(many / file, "pt") as shard:
            assert key in shard.keys()  # noqa: SIM118 (it is no mapping)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())


def test_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = ARCHITECTURES["qwen3"]
    first = weights(make_checkpoint(config, tmp_path / "a", seed=1))
    again = weights(make_checkpoint(config, tmp_path / "b", seed=1))
    other = weights(make_checkpoint(config, tmp_path / "c", seed=2))
    fewer = weights(make_checkpoint({**config, "num_hidden_layers": 1}, tmp_path / "d", seed=1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    assert all(torch.equal(first[key], fewer[key]) for key in fewer)
    q, k = (first[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qk")
    assert not torch.equal(q[: len(k)], k)


def test_a_tied_head_repeats_the_embedding_or_is_left_out(tmp_path: Path) -> None:
    config = ARCHITECTURES["qwen3"]
    with_head = weights(make_checkpoint(config, tmp_path / "a"))
    assert torch.equal(with_head["lm_head.weight"], with_head["model.embed_tokens.weight"])
    without = weights(make_checkpoint(config, tmp_path / "b", write_tied_head=False))
    assert set(with_head) - set(without) == {"lm_head.weight"}
    untied = weights(make_checkpoint(ARCHITECTURES["llama-untied"], tmp_path / "c"))
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])


def test_values_have_the_spread_asked_for(tmp_path: Path) -> None:
    # A tensor of more than one chunk, so that pieces repeating each other would show.
    config = {**ARCHITECTURES["qwen3"], "vocab_size": CHUNK // 32 + 1000, "num_hidden_layers": 1}
    make_checkpoint(config, tmp_path, dtype="float32", scale=0.5, write_tied_head=False)
    table = weights(tmp_path)["model.embed_tokens.weight"]
    # Four million draws: the standard error of both is about 0.5 / 2000.
    assert table.mean().item() == pytest.approx(0.0, abs=0.002)
    assert table.std().item() == pytest.approx(0.5, abs=0.002)
    assert not torch.equal(table[:1000], table[CHUNK // 32 :])


def test_names_and_shapes_of_the_published_checkpoint() -> None:
    config = json.loads((CONFIGS / "qwen3-0.6b.json").read_text("utf-8"))
    shapes = tensor_shapes(config)
    assert len(shapes) == 311
    assert list(shapes)[:3] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
    ]
    assert shapes["model.layers.27.self_attn.q_proj.weight"] == (2048, 1024)
    assert shapes["model.layers.27.self_attn.k_proj.weight"] == (1024, 1024)
    assert shapes["model.layers.27.self_attn.o_proj.weight"] == (1024, 2048)
    assert shapes["model.layers.27.self_attn.q_norm.weight"] == (128,)


def test_an_earlier_run_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    make_checkpoint(ARCHITECTURES["qwen3"], tmp_path, max_shard_bytes=12_000)
    make_checkpoint(ARCHITECTURES["qwen3"], tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    ]


def test_the_demo_tokenizer_is_saved_beside_the_weights(
    demo_model_path: Path, tmp_path: Path
) -> None:
    config = {**ARCHITECTURES["llama"], "vocab_size": 49152, "hidden_size": 8, "head_dim": 2}
    make_checkpoint(config, tmp_path / "fits", tokenizer_from=demo_model_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "fits")
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"
    with pytest.raises(ValueError, match="needs a vocabulary of 49152, .* vocab_size 131"):
        make_checkpoint(ARCHITECTURES["llama"], tmp_path / "no", tokenizer_from=demo_model_path)
    assert not list((tmp_path / "no").glob("*.safetensors"))


def test_what_can_not_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is none of LlamaForCausalLM"):
        make_checkpoint({**ARCHITECTURES["qwen3"], "architectures": ["GPT2LMHeadModel"]}, tmp_path)
    with pytest.raises(ValueError, match="dtype must be one of"):
        make_checkpoint(ARCHITECTURES["qwen3"], tmp_path, dtype="int8")
    assert list(tmp_path.iterdir()) == []
