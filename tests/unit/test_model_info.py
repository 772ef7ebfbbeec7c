"""What a model's files say of it: every value of a wrong type or size is one clear error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minisgl.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from minisgl.layers import get_rope
from minisgl.models import ModelConfig, load_model_config, load_model_info, load_weight
from minisgl.models.config import token_ids
from minisgl.tokenizer import Tokenizer

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def published(name: str = "qwen3-0.6b", **changes: Any) -> dict[str, Any]:
    """A published config.json with changes."""
    return {**json.loads((CONFIGS / f"{name}.json").read_text("utf-8")), **changes}


def read(name: str = "qwen3-0.6b", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(SimpleNamespace(**published(name, **changes)))


def refused(name: str = "qwen3-0.6b", **changes: Any) -> str:
    """The message, one line, of the error that the config raises."""
    with pytest.raises(UnsupportedModelError) as caught:
        read(name, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# -- config.json ---------------------------------------------------------------------------

SIZES = (
    "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim",
    "intermediate_size", "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", ["4", -4, 0, 320.0, True, [4], {"a": 1}, math.nan, 10**30])
@pytest.mark.parametrize("field", SIZES)
def test_sizes_are_whole_numbers_in_range(field: str, value: Any) -> None:
    message = refused(**{field: value})
    assert f"{field} = {value!r} must be an integer from " in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 63}, ["head_dim = 63", "even"]),
        ({"head_dim": 1}, ["head_dim = 1", "from 2"]),
        ({"head_dim": None, "hidden_size": 8}, ["head_dim = 0", "from 2"]),
        ({"num_hidden_layers": 10_001}, ["num_hidden_layers = 10001", "from 1 to 10000"]),
        ({"max_position_embeddings": 2**31 + 1}, ["max_position_embeddings", "to 2147483648"]),
        ({"max_position_embeddings": "long"}, ["max_position_embeddings = 'long'"]),
        ({"model_type": 5}, ["model_type = 5", "string"]),
        ({"hidden_act": 5}, ["hidden_act = 5", "string"]),
        ({"hidden_act": ["silu"]}, ["hidden_act = ['silu']", "string"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["architectures = 'Qwen3", "list of strings"]),
        ({"architectures": [5]}, ["architectures = [5]", "list of strings"]),
        ({"architectures": ["x" * 5000, 5]}, ["architectures", "...", "list of strings"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings = 'false'", "true or false"]),
        ({"attention_bias": 1}, ["attention_bias = 1", "true or false"]),
        ({"mlp_bias": "no"}, ["mlp_bias = 'no'", "true or false"]),
        ({"use_sliding_window": "yes"}, ["use_sliding_window = 'yes'", "true or false"]),
        ({**WINDOW, "sliding_window": -4}, ["sliding_window = -4", "from 1"]),
        ({**WINDOW, "sliding_window": "4"}, ["sliding_window = '4'", "from 1"]),
        ({**WINDOW, "sliding_window": 0}, ["sliding_window = 0", "from 1"]),
        ({**WINDOW, "max_window_layers": "2"}, ["max_window_layers = '2'", "from 0"]),
        ({**WINDOW, "max_window_layers": -1}, ["max_window_layers = -1", "from 0"]),
        ({**WINDOW, "layer_types": "full"}, ["layer_types = 'full'", "list of strings"]),
        ({**WINDOW, "layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 28"]),
        ({**WINDOW, "layer_types": ["chunked"]}, ["layer_types", "chunked"]),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], named: list[str]) -> None:
    message = refused(**changes)
    for words in named:
        assert words in message


@pytest.mark.parametrize("value", ["x", -1e-6, 1e30, 1, True, math.nan, math.inf, 10**400])
def test_rms_norm_eps_is_a_small_number(value: Any) -> None:
    assert "rms_norm_eps = " in refused(rms_norm_eps=value)


def test_null_fields_take_their_defaults() -> None:
    assert read(rms_norm_eps=None).rms_norm_eps == 1e-6
    assert read(rms_norm_eps=0).rms_norm_eps == 0
    assert read(hidden_act=None).hidden_act == "silu"
    assert read(tie_word_embeddings=None, attention_bias=None).tie_word_embeddings is False
    assert read(**WINDOW, max_window_layers=None).full_attention_layers == tuple(range(28))
    # A number of layers beyond the model's costs no memory.
    assert read(**WINDOW, max_window_layers=2**31).full_attention_layers == tuple(range(28))
    assert read("mistral-7b-v0.1", sliding_window=None).sliding_window is None
    assert "sliding_window = -4" in refused("mistral-7b-v0.1", sliding_window=-4)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "'fp8'"),
        ("awq", "'awq'"),
    ],
)
def test_quantized_folders_are_refused(value: Any, named: str) -> None:
    message = refused(quantization_config=value)
    assert f"quantization_config = {named}" in message
    assert "quantized safetensors are not supported" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": -1}, "num_experts = -1"),
        ({"num_experts": "8"}, "num_experts = '8'"),
        ({"num_experts": None, "num_local_experts": 1.5}, "num_local_experts = 1.5"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 must be an integer from 1 to 128"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 must be an integer from 1 to"),
        ({"num_experts_per_tok": None}, "has no 'num_experts_per_tok'"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        ({"norm_topk_prob": "true"}, "norm_topk_prob = 'true'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"decoder_sparse_step": "1"}, "decoder_sparse_step = '1'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers = 3"),
        ({"mlp_only_layers": ["3"]}, "mlp_only_layers = ['3']"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers = [True]"),
    ],
)
def test_bad_experts_are_named(changes: dict[str, Any], named: str) -> None:
    assert named in refused("qwen3-30b-a3b", **changes)


# -- RoPE ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", 0, -1.0, 1, True, math.inf, math.nan, 1e300, [1e4]])
def test_rope_theta_is_a_number_above_one(value: Any) -> None:
    assert f"rope_theta = {value!r} must be" in refused(rope_theta=value)
    message = refused(rope_parameters={"rope_theta": value, "rope_type": "default"})
    assert f"rope_parameters.rope_theta = {value!r} must be" in message


@pytest.mark.parametrize("value", ["x", 0, -2.0, math.inf, math.nan, True, [2.0], 1e300, 1e-300])
@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"type": "linear", "factor": 2.0}, "factor"),
        (YARN, "factor"),
        (YARN, "attention_factor"),
        (LLAMA3, "factor"),
        (LLAMA3, "low_freq_factor"),
        (LLAMA3, "high_freq_factor"),
    ],
)
def test_factors_are_positive_numbers(scaling: dict[str, Any], field: str, value: Any) -> None:
    message = refused(rope_scaling={**scaling, field: value})
    assert f"rope_scaling.{field} = {value!r} must be a number" in message


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ("yarn", "rope_scaling = 'yarn' must be an object"),
        (["yarn"], "rope_scaling = ['yarn'] must be an object"),
        ({"rope_type": 5}, "Unsupported RoPE type: 5"),
        ({"rope_type": ["yarn"]}, "Unsupported RoPE type: ['yarn']"),
        ({"rope_type": "linear"}, "has no 'rope_scaling.factor'"),
        ({**LLAMA3, "low_freq_factor": None}, "has no 'rope_scaling.low_freq_factor'"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor = 4.0 must be above low_freq"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings = 0"),
        ({**YARN, "original_max_position_embeddings": "4"}, "position_embeddings = '4'"),
        ({**YARN, "factor": 1e6}, "the context is at most 2147483648"),
        ({**YARN, "beta_fast": -1}, "rope_scaling.beta_fast = -1"),
        ({**YARN, "mscale": "x"}, "rope_scaling.mscale = 'x'"),
        ({**YARN, "truncate": "no"}, "rope_scaling.truncate = 'no'"),
        ({**YARN, "factor": {"a": 1}}, "rope_scaling.factor = {'a': 1}: RoPE that differs by"),
        ({"rope_type": "freq_factors", "factors": [1.0]}, "must be 64 numbers"),
        ({"rope_type": "freq_factors", "factors": [0.0] * 64}, "factors = [0.0, 0.0"),
        ({"rope_type": "freq_factors", "factors": 1.0}, "factors = 1.0"),
    ],
)
def test_bad_scalings_are_named(scaling: Any, named: str) -> None:
    assert named in refused(rope_scaling=scaling)


def test_rope_by_layer_type_is_refused() -> None:
    each = {"rope_type": "default", "rope_theta": 1e6}
    message = refused(rope_parameters={"full_attention": each, "sliding_attention": each})
    assert "rope_parameters.full_attention = {" in message
    assert "differs by layer type is not supported" in message


@pytest.mark.parametrize("value", [0, -0.5, 1.5, "x", math.nan, 1 / 128, 0.4])
def test_the_rotated_part_is_an_even_part_of_a_head(value: Any) -> None:
    assert "partial_rotary_factor = " in refused(partial_rotary_factor=value)  # 0.4: 51 of 128
    message = refused(rope_scaling={**YARN, "partial_rotary_factor": value})
    assert "partial_rotary_factor = " in message


@pytest.mark.parametrize("factor", [0.001, 0.5, 1, 40, 1e4])
@pytest.mark.parametrize("scaling", [{"type": "linear"}, YARN, LLAMA3], ids=["linear", "y", "l3"])
def test_every_scaling_that_is_read_gives_a_finite_table(
    scaling: dict[str, Any], factor: float
) -> None:
    changed = {**scaling, "factor": factor, "original_max_position_embeddings": 4}
    rotary = read(rope_scaling=changed, max_position_embeddings=32).rotary_config
    assert rotary.table_length is None
    rope = get_rope(128, 128, rotary.max_position, rotary.base, rotary.scaling)
    assert rope._cos_sin_cache.isfinite().all()
    assert len(rope._cos_sin_cache) >= rotary.max_context


def test_a_scaling_keeps_what_its_type_reads() -> None:
    scaling = read(
        rope_scaling={"type": "linear", "factor": 2, "note": [[1]]}
    ).rotary_config.scaling
    assert scaling == {"rope_type": "linear", "factor": 2.0}
    full = {**YARN, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.5}
    assert read(rope_scaling={**full, "beta_slow": None}).rotary_config.scaling == full


# -- token ids -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, ()), (0, (0,)), ([1, 2], (1, 2)), (-1, ()), ([3, -1], (3,)), ([], ())],
)
def test_token_ids(value: Any, ids: tuple[int, ...]) -> None:
    assert token_ids(value) == ids
    assert read(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize("value", ["2", True, 2.0, -2, [None], ["2"], [1, True], [[1]], {"a": 1}])
def test_bad_token_ids_are_named(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(eos_token_id=value)
    assert f"eos_token_id of the config = {value!r} must be null, a token id" in str(caught.value)


# -- folders -------------------------------------------------------------------------------


def folder(path: Path, generation: Any = None, **changes: Any) -> str:
    """A folder with a config and perhaps generation defaults."""
    (path / "config.json").write_text(json.dumps(published(**changes)), "utf-8")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({"torch_dtype": None}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ],
)
def test_dtype_of_a_folder(tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype) -> None:
    assert load_model_info(folder(tmp_path, **changes)).dtype == dtype


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float64", "torch.int8", "", {"text": "float16"}, 16, False])
def test_an_unknown_dtype_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_info(folder(tmp_path, **{field: value}))
    assert f"{field} = {value!r} must be" in str(caught.value)
    assert "float32, bfloat16, float16" in str(caught.value)


def test_generation_defaults_are_made_tidy(tmp_path: Path) -> None:
    generation = {"top_k": 50.0, "top_p": None, "temperature": 1.0, "eos_token_id": [7, -1]}
    info = load_model_info(
        folder(tmp_path, {**generation, "max_new_tokens": 9, "cache_implementation": "x"})
    )
    assert info.generation_defaults["top_k"] == 50
    assert isinstance(info.generation_defaults["top_k"], int)
    assert "top_p" not in info.generation_defaults
    assert info.eos_token_ids == {7, 151645}


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"temperature": 100}, "temperature = 100"),
        ({"max_new_tokens": "many"}, "max_new_tokens = 'many'"),
        ({"top_k": 50.5}, "top_k = 50.5"),
        ({"top_k": [50]}, "top_k = [50]"),
        ({"top_p": 0}, "top_p = 0"),
        ({"min_p": -1}, "min_p = -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0"),
        ({"do_sample": "false"}, "do_sample = 'false'"),
        ({"eos_token_id": ["2"]}, "eos_token_id = ['2']"),
        ({"eos_token_id": {"a": 2}}, "eos_token_id = {'a': 2}"),
        ([1], "not a JSON object"),
    ],
)
def test_bad_generation_defaults_are_named(tmp_path: Path, generation: Any, named: str) -> None:
    path = folder(tmp_path, generation)
    with pytest.raises(CheckpointError) as caught:
        load_model_info(path)
    assert f"{tmp_path / 'generation_config.json'}" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "name", [None, 5, ["a"], {"a": 1}, "", ".", "..", "../a", "/etc/hostname", "a\0b", "\ud800"]
)
def test_an_index_names_plain_files(tmp_path: Path, name: Any) -> None:
    path = folder(tmp_path)
    index = {"weight_map": {"model.a": "model-1.safetensors", "model.b": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(CheckpointError) as caught:
        next(load_weight(path, "cpu"))
    message = f"index.json names {name!r} for model.b: not a file of its folder"
    assert message in str(caught.value)


# -- GGUF ----------------------------------------------------------------------------------


def write_gguf(
    path: Path, matrices: tuple[str, ...] = ("F32",), eps: float = 1e-6, base: float = 1e4,
    context: int = 1024,
) -> str:  # fmt: skip
    """A file with the metadata of a tiny Llama, and matrices [32, 32 * (1 + i)] of these types."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(context)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(base)
    for i, kind in enumerate(matrices):
        data = gguf.quants.quantize(np.ones((32, 32 * (1 + i)), np.float32), Type[kind])
        name = "token_embd.weight" if i == 0 else f"blk.0.m{i}.weight"
        writer.add_tensor(name, data, raw_dtype=Type[kind])
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(100_000, np.float32))  # no matrix
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"base": 0.0}, "rope_theta = 0.0"),
        ({"eps": 1e30}, "rms_norm_eps = 1e+30"),
        ({"context": 2**32 - 1}, "max_position_embeddings = 4294967295"),
    ],
)
def test_bad_metadata_ends_in_the_same_errors(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("matrices", "dtype"),
    [
        (("F32",), torch.float32),
        (("F16",), torch.float16),
        (("BF16",), torch.bfloat16),
        (("Q8_0",), torch.bfloat16),
        (("F32", "F16"), torch.float32),  # 4 * 32 bytes a row against 2 * 64: the first
        (("F32", "F32", "F16"), torch.float32),
        (("F32", "F16", "F16"), torch.float16),
        (("F16", "Q4_0", "Q8_0", "Q8_0"), torch.bfloat16),
    ],
)
def test_dtype_of_a_gguf_file_is_that_of_most_bytes(
    tmp_path: Path, matrices: tuple[str, ...], dtype: torch.dtype
) -> None:
    assert load_model_info(write_gguf(tmp_path / "m.gguf", matrices)).dtype == dtype


def test_a_gguf_file_may_lack_a_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFoundError, match=f"No tokenizer in {path}.*absent; use token ids"):
        Tokenizer.load(path)
