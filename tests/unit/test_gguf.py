"""GGUF files: weights and config come out exactly, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minisgl.errors import CheckpointError, ModelError, UnsupportedModelError
from minisgl.models.gguf import gguf_num_tensors, iter_gguf_tensors, load_gguf_config
from tests.unit.gguf_files import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV,
    KV_HEADS,
    SHARED_FFN,
    VOCAB,
    Q,
    Written,
)

CONFIGS = Path(__file__).parents[1] / "configs"
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


# ---------------------------------------------------------------- tensors

RENAMED = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def two_halves(stored: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: neighbours 2i and 2i+1 of a head become its rows i and i + d/2."""
    wanted = torch.empty_like(stored)
    size = stored.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            wanted[head * size + i] = stored[head * size + 2 * i]
            wanted[head * size + size // 2 + i] = stored[head * size + 2 * i + 1]
    return wanted


def expected_tensors(written: Written, arch: str) -> dict[str, torch.Tensor]:
    """The file's tensors under Hugging Face names in float32, by the plainest means."""
    result = {}
    for stored_name in written.stored:
        value = written.value(stored_name)
        if not stored_name.startswith("blk."):
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
                "output.weight": "lm_head.weight",
            }[stored_name]
            result[name] = value
            continue
        _, layer, part, suffix = stored_name.split(".")
        if part.endswith("_exps"):
            projection = part.removeprefix("ffn_").removesuffix("_exps")
            for expert in range(EXPERTS):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                result[name] = value[expert]
            continue
        if arch in ("llama", "mixtral") and part in ("attn_q", "attn_k"):
            value = two_halves(value, HEADS if part == "attn_q" else KV_HEADS)
        if part == "ffn_gate_inp_shexp":
            value = value.view(1, HIDDEN)
        result[f"model.layers.{layer}.{RENAMED[part]}.{suffix}"] = value
    return result


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        *(("llama", kind) for kind in ("F32", "F16", "BF16", *QUANTIZED)),
        ("qwen2", "F32"),
        ("qwen2", "Q8_0"),
        ("qwen3", "BF16"),
        ("qwen3moe", "Q4_K"),
        ("qwen3moe", "F16"),
        ("qwen2moe", "Q4_K"),
        ("qwen2moe", "F16"),
        ("mixtral", "Q8_0"),
        ("mixtral", "BF16"),
    ],
)
def test_tensors_are_exact(tmp_path: Path, arch: str, kind: str, dtype: torch.dtype | None) -> None:
    written = Written(tmp_path / "m.gguf", arch, kind)
    expected = expected_tensors(written, arch)
    got = dict(iter_gguf_tensors(written.path, dtype))
    assert list(got) == sorted(expected)
    assert gguf_num_tensors(written.path) == len(expected)
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    for name, tensor in got.items():
        is_matrix = expected[name].ndim > 1 and "shared_expert_gate" not in name
        stored = plain.get(kind, torch.float32) if is_matrix else torch.float32
        assert tensor.dtype == (dtype or stored), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_blocks_of_rows_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path / "m.gguf", "llama", "Q4_1")
    whole = dict(iter_gguf_tensors(written.path))
    # 7 rows of HIDDEN: blocks that neither divide the rows nor end at a head.
    monkeypatch.setattr("minisgl.models.gguf._BLOCK_BYTES", 4 * HIDDEN * 7)
    for name, tensor in iter_gguf_tensors(written.path):
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.filterwarnings("error")
def test_views_of_the_file_outlive_the_iterator_and_protect_it(tmp_path: Path, kind: str) -> None:
    written = Written(tmp_path / "m.gguf", "qwen3", kind)
    before = Path(written.path).read_bytes()
    tensors = dict(iter_gguf_tensors(written.path))
    value = written.value("token_embd.weight")
    assert torch.equal(tensors["model.embed_tokens.weight"].float(), value)
    for tensor in tensors.values():
        tensor.zero_()
    assert Path(written.path).read_bytes() == before


def test_llama_biases_are_unpermuted(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = {"attn_q": Q, "attn_k": KV, "attn_v": KV, "attn_output": HIDDEN}
    extra = {
        f"blk.{layer}.{part}.bias": rng.normal(size=size)
        for layer in range(2)
        for part, size in sizes.items()
    }
    written = Written(tmp_path / "m.gguf", "llama", extra=extra)
    config = load_gguf_config(written.path)
    assert config["attention_bias"] is True and config["mlp_bias"] is False
    got = dict(iter_gguf_tensors(written.path))
    for name, value in expected_tensors(written, "llama").items():
        assert torch.equal(got[name], value), name


def test_unknown_tensors_and_types_are_named_before_any_is_yielded(tmp_path: Path) -> None:
    extra = {"blk.0.ssm_in.weight": np.zeros((2, HIDDEN)), "mm.0.weight": np.zeros((2, HIDDEN))}
    written = Written(tmp_path / "m.gguf", extra=extra)
    for call in (iter_gguf_tensors, gguf_num_tensors):
        with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight, mm\.0\.weight"):
            call(written.path)

    path = tmp_path / "type.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_head_count(HEADS)
    block = np.zeros((2, 66), np.uint8)
    writer.add_tensor("token_embd.weight", block, raw_dtype=Type.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight .* IQ2_XXS"):
        iter_gguf_tensors(str(path))


# ---------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("arch", "name", "model_type"),
    [
        ("llama", "LlamaForCausalLM", "llama"),
        ("mistral3", "MistralForCausalLM", "mistral"),
        ("qwen2", "Qwen2ForCausalLM", "qwen2"),
        ("qwen3", "Qwen3ForCausalLM", "qwen3"),
        ("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe"),
        ("qwen2moe", "Qwen2MoeForCausalLM", "qwen2_moe"),
        ("mixtral", "MixtralForCausalLM", "mixtral"),
    ],
)
def test_config(tmp_path: Path, arch: str, name: str, model_type: str) -> None:
    config = load_gguf_config(Written(tmp_path / "m.gguf", arch).path)
    expected = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if not arch.startswith("qwen2"):
        expected |= {"attention_bias": False, "mlp_bias": False}
    if arch == "mixtral":
        expected |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
        expected["intermediate_size"] = EXPERT_FFN  # the tensors' when no key says it
    if arch == "qwen2moe":
        expected |= {"qkv_bias": True, "shared_expert_intermediate_size": SHARED_FFN}
    if arch.endswith("moe"):
        expected |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_FFN,
            "norm_topk_prob": arch == "qwen3moe",
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
    assert config == expected


@pytest.mark.parametrize(
    ("arch", "keys", "changes"),
    [
        ("qwen3", {"qwen3.attention.key_length": 128}, {"head_dim": 128}),
        ("llama", {"llama.rope.dimension_count": 64}, {"head_dim": 64}),
        ("llama", {"llama.vocab_size": 99}, {"vocab_size": VOCAB}),
        (
            "llama",
            {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 2},
            {"eos_token_id": [2, 3]},
        ),
        ("llama", {"tokenizer.ggml.padding_token_id": 2**32 - 1}, {"pad_token_id": None}),
        (
            "llama",
            {"llama.attention.sliding_window": 256},
            {"sliding_window": 256, "architectures": ["MistralForCausalLM"]},
        ),
        (
            "qwen2",
            {"qwen2.attention.sliding_window": 256},
            {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0},
        ),
        (
            "mixtral",
            {"llama.attention.sliding_window": 256, "llama.expert_feed_forward_length": 99},
            {"sliding_window": 256, "model_type": "mixtral", "intermediate_size": 99},
        ),
        ("qwen2moe", {"qwen2moe.expert_weights_norm": True}, {"norm_topk_prob": True}),
        ("qwen3moe", {"qwen3moe.expert_weights_norm": False}, {"norm_topk_prob": False}),
        ("llama", {"llama.rope.scaling.type": "none"}, {"rope_scaling": None}),
        (
            "llama",
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            "llama",
            {"llama.rope.scale_linear": 2.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "qwen3",
            {
                "qwen3.rope.scaling.type": "yarn",
                "qwen3.rope.scaling.factor": 4.0,
                "qwen3.rope.scaling.original_context_length": 256,
                "qwen3.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "beta_fast": 16.0,
                }
            },
        ),
    ],
)
def test_config_follows_the_metadata(
    tmp_path: Path, arch: str, keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = load_gguf_config(Written(tmp_path / "m.gguf", arch, keys=keys).path)
    assert {key: config[key] for key in changes} == changes


def test_yarn_attention_factor_is_yarns_own_times_the_files(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    scaling = load_gguf_config(Written(tmp_path / "m.gguf", keys=keys).path)["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * 1.2079441541679836, rel=1e-12)
    assert scaling["original_max_position_embeddings"] == 1024


def test_rope_freqs_is_config_and_not_a_weight(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    extra = {"rope_freqs.weight": factors}
    written = Written(tmp_path / "m.gguf", drop=("output.weight",), extra=extra)
    config = load_gguf_config(written.path)
    assert config["rope_scaling"] == {"rope_type": "freq_factors", "factors": factors.tolist()}
    assert config["tie_word_embeddings"] is True
    names = [name for name, _ in iter_gguf_tensors(written.path)]
    assert not any("rope" in name or "lm_head" in name for name in names)

    ones = {"rope_freqs.weight": np.ones(HEAD_DIM // 2)}
    assert load_gguf_config(Written(tmp_path / "1.gguf", extra=ones).path)["rope_scaling"] is None
    for index, wrong in enumerate((np.ones(HEAD_DIM), np.zeros(HEAD_DIM // 2))):
        extra = {"rope_freqs.weight": wrong}
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            load_gguf_config(Written(tmp_path / f"w{index}.gguf", extra=extra).path)


@pytest.mark.parametrize(
    ("arch", "keys", "error", "message"),
    [
        ("gemma", {}, UnsupportedModelError, "'gemma' is not supported; supported: llama,"),
        (
            "qwen3",
            {"qwen3.expert_count": 8},
            UnsupportedModelError,
            "only files of llama, qwen2moe",
        ),
        ("llama", {"llama.expert_count": 8}, CheckpointError, "expert_count = 8, but .* None"),
        ("mixtral", {"llama.expert_weights_norm": False}, UnsupportedModelError, "normalizes"),
        ("mixtral", {"llama.expert_used_count": 0}, CheckpointError, "expert_used_count = 0"),
        (
            "qwen2moe",
            {"qwen2moe.attention.sliding_window": 9},
            UnsupportedModelError,
            "in some layers only",
        ),
        ("llama", {"llama.logit_scale": 0.5}, UnsupportedModelError, r"llama\.logit_scale = 0\.5"),
        ("llama", {"split.count": 3}, UnsupportedModelError, "merge them"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
        ("llama", {"llama.rope.dimension_count": 32}, UnsupportedModelError, "dimension_count"),
        ("llama", {"llama.attention.value_length": 32}, UnsupportedModelError, "value heads"),
        ("llama", {"llama.block_count": 4_000_000}, CheckpointError, "block_count = 4000000"),
        ("llama", {"llama.attention.head_count": 0}, CheckpointError, "head_count = 0"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, UnsupportedModelError, "alike"),
        ("llama", {"llama.rope.freq_base": float("nan")}, CheckpointError, "freq_base = nan"),
        ("llama", {"llama.embedding_length": "x"}, CheckpointError, "embedding_length = 'x'"),
        ("qwen3moe", {"qwen3moe.expert_count": 10**9}, CheckpointError, "expert_count"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_config_refuses(
    tmp_path: Path, arch: str, keys: dict[str, Any], error: type[ModelError], message: str
) -> None:
    written = Written(tmp_path / "m.gguf", arch, keys=keys)
    with pytest.raises(error, match=message):
        load_gguf_config(written.path)


# ---------------------------------------------------------------- the demo model


def test_demo_config_equals_the_published_one(demo_model_path: Path) -> None:
    config = load_gguf_config(str(demo_model_path))
    published = json.loads((CONFIGS / "smollm2-135m-instruct.json").read_text())
    shared = config.keys() & published.keys()
    assert len(shared) >= 16
    assert {key: config[key] for key in shared} == {key: published[key] for key in shared}
    assert config["head_dim"] == 64


@pytest.mark.slow
def test_demo_tensors_equal_transformers(demo_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, name = str(demo_model_path.parent), demo_model_path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    expected = model.state_dict()
    seen = set()
    for key, tensor in iter_gguf_tensors(str(demo_model_path)):
        assert torch.equal(tensor, expected[key]), key
        seen.add(key)
    assert expected.keys() - seen == {"lm_head.weight"}  # tied: not in the file
    assert gguf_num_tensors(str(demo_model_path)) == len(seen) == 272
