"""Configs of two `transformers` layouts and their traps, and weights that fit the models."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from minisgl.config import EngineConfig, ModelFacts
from minisgl.errors import ConfigError, UnsupportedModelError
from minisgl.kvcache import KVShape
from minisgl.layers import set_rope_device
from minisgl.layers.rotary import rope_type
from minisgl.models import ModelConfig, RotaryConfig, create_model, load_weight
from minisgl.resolve import resolve
from minisgl.utils import torch_dtype
from minisgl.utils.hardware import Hardware
from tools.make_checkpoint import make_checkpoint

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Of these two no published config is here: what makes them of their dense kin's.
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-3.2-1b-instruct", {"head_dim": 8}),
    "llama-biases": ("llama-3.1-8b-instruct", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral-7b-v0.1", {}),
    "qwen2": ("qwen2.5-0.5b-instruct", {}),
    "qwen3": ("qwen3-0.6b", {"head_dim": 16}),
    "qwen3-biases": ("qwen3-14b", {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": ("qwen3-30b-a3b", EXPERTS),
    "qwen3-moe-mixed": (
        "qwen3-30b-a3b", {**EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen2-moe": ("qwen2.5-0.5b-instruct", QWEN2_MOE),
    "qwen2-moe-mixed": (
        "qwen2.5-0.5b-instruct", {**QWEN2_MOE, "qkv_bias": False, "mlp_only_layers": [3],
                                  "decoder_sparse_step": 2},
    ),
    "mixtral": ("mistral-7b-v0.1", MIXTRAL),
}  # fmt: skip


@pytest.fixture(autouse=True)
def rope_device_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The RoPE device set here is forgotten."""
    monkeypatch.setattr("minisgl.layers.rotary._rope_device", None)


def published(name: str) -> dict[str, Any]:
    """A published config.json."""
    return json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))


def read(raw: dict[str, Any]) -> ModelConfig:
    """The config that a config.json's content gives."""
    return ModelConfig.from_hf(SimpleNamespace(**raw))


def build(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model on the meta device."""
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(dtype):
        return create_model(config)


# -- weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weight_loader_produces_exactly_the_model_keys(
    name: str, tied: bool, tmp_path: Path
) -> None:
    base, changes = ARCHITECTURES[name]
    raw = {**published(base), **TINY, **changes, "tie_word_embeddings": tied}
    folder = str(make_checkpoint(raw, tmp_path))
    model = build(read(raw))
    expected = {k: (tuple(v.shape), v.dtype) for k, v in model.state_dict().items()}
    loaded = dict(load_weight(folder, "cpu"))
    found = {k: (tuple(v.shape), v.dtype) for k, v in loaded.items()}
    if tied:  # published checkpoints hold the head although it is the embedding
        assert found.pop("lm_head.weight") == ((131, 32), torch.bfloat16)
        assert "lm_head.weight" not in expected
    assert found == expected
    model.load_state_dict(dict(loaded))
    after = model.state_dict()
    assert all(after[key] is loaded[key] for key in expected)  # replaced, not copied


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_tied_head_may_be_absent(name: str, tmp_path: Path) -> None:
    base, changes = ARCHITECTURES[name]
    raw = {**published(base), **TINY, **changes, "tie_word_embeddings": True}
    folder = str(make_checkpoint(raw, tmp_path, write_tied_head=False))
    loaded = dict(load_weight(folder, "cpu"))
    assert "lm_head.weight" not in loaded
    build(read(raw)).load_state_dict(loaded)


def test_merged_weights_hold_their_parts_in_order(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base, changes = ARCHITECTURES["qwen3-moe-mixed"]
    raw = {**published(base), **TINY, **changes, "attention_bias": True}
    folder = make_checkpoint(raw, tmp_path)
    parts = load_file(folder / "model.safetensors")
    loaded = dict(load_weight(str(folder), "cpu"))
    for kind in ("weight", "bias"):
        qkv = [parts[f"model.layers.2.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        assert torch.equal(loaded[f"model.layers.2.self_attn.qkv_proj.{kind}"], torch.cat(qkv))
    dense, sparse = "model.layers.1.mlp", "model.layers.3.mlp.experts"
    gate_up = [parts[f"{dense}.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(loaded[f"{dense}.gate_up_proj.weight"], torch.cat(gate_up))
    for expert in range(4):
        gate_up = [parts[f"{sparse}.{expert}.{p}_proj.weight"] for p in ("gate", "up")]
        assert torch.equal(loaded[f"{sparse}.gate_up_proj"][expert], torch.cat(gate_up))
        down = parts[f"{sparse}.{expert}.down_proj.weight"]
        assert torch.equal(loaded[f"{sparse}.down_proj"][expert], down)


def test_qwen3_0_6b_on_meta() -> None:
    model = build(read(published("qwen3-0.6b")))
    assert len(model.state_dict()) == 226
    # 151936 * 1024 for the (tied) vocabulary, 28 layers of 15,730,944, and the last norm.
    assert model.num_params() == 596_049_920
    assert tuple(model.model.layers.op_list[0].self_attn.qkv_proj.weight.shape) == (4096, 1024)
    untied = build(read({**published("qwen3-0.6b"), "tie_word_embeddings": False}))
    assert len(untied.state_dict()) == 227
    assert untied.num_params() == 596_049_920 + 151936 * 1024


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    raw = published("qwen3-0.6b")
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3Moe"):
        build(read({**raw, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match="names no architecture; supported: Llama"):
        build(read({**raw, "architectures": None}))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="Unsupported activation: 'relu2'; supported: silu"):
        build(read({**published("qwen3-0.6b"), "hidden_act": "relu2"}))


# -- configs -------------------------------------------------------------------------------


def in_layout_5(raw: dict[str, Any]) -> dict[str, Any]:
    """The same config as `transformers` 5 writes it: base and scaling in one field."""
    rest = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    return {**rest, "rope_parameters": {"rope_theta": raw["rope_theta"], **scaling}}


QWEN3 = ModelConfig(
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    num_layers=28,
    num_qo_heads=16,
    num_kv_heads=8,
    head_dim=128,  # explicit: hidden_size / num_attention_heads would be 64
    hidden_size=1024,
    vocab_size=151936,
    intermediate_size=3072,
    rms_norm_eps=1e-6,
    rotary_config=RotaryConfig(128, 128, 40960, 1e6, None),
    tie_word_embeddings=True,
    eos_token_ids=(151645,),
)
QWEN2 = ModelConfig(
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    num_layers=24,
    num_qo_heads=14,
    num_kv_heads=2,
    head_dim=64,
    hidden_size=896,
    vocab_size=151936,
    intermediate_size=4864,
    rms_norm_eps=1e-6,
    rotary_config=RotaryConfig(64, 64, 32768, 1e6, None),
    tie_word_embeddings=True,
    attention_bias=True,  # on q, k and v; the config has no field for it
    output_bias=False,
    sliding_window=None,  # the config has one, but use_sliding_window is false
    eos_token_ids=(151645,),
)


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3-0.6b", QWEN3), ("qwen2.5-0.5b-instruct", QWEN2)]
)
def test_model_config_from_hf(name: str, expected: ModelConfig) -> None:
    raw = published(name)
    assert read(raw) == expected
    assert read(in_layout_5(raw)) == expected
    assert ModelConfig.from_hf(AutoConfig.for_model(**raw)) == expected  # a config object
    assert not expected.is_moe
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for layout in (dict, in_layout_5):
        scaled = read(layout({**raw, "rope_scaling": yarn})).rotary_config
        assert (scaled.base, scaled.scaling) == (1e6, yarn)
        assert scaled.max_context == 131072


@pytest.mark.parametrize("changes", [QWEN2_MOE, MIXTRAL], ids=["qwen2-moe", "mixtral"])
def test_model_config_of_experts_in_both_layouts(changes: dict[str, Any]) -> None:
    # rope_theta and rms_norm_eps are given: the classes' defaults have a test of their own.
    raw = {**published("mistral-7b-v0.1"), **TINY, **changes}
    config = read(raw)
    assert read(in_layout_5(raw)) == config
    assert ModelConfig.from_hf(AutoConfig.for_model(**raw)) == config
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    assert config.is_moe
    if changes is MIXTRAL:  # the experts have the dense size, and nothing says otherwise
        assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (48, 0)
        assert config.norm_topk_prob
        assert read({**raw, "norm_topk_prob": False, "mlp_only_layers": [0]}) == config
    else:
        assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (16, 24)
        assert not config.norm_topk_prob
        assert read({**raw, "norm_topk_prob": True}).norm_topk_prob


def test_defaults_of_mixtral() -> None:
    raw = {**published("mistral-7b-v0.1"), **TINY, **MIXTRAL}
    bare = read(without(raw, "rope_theta", "rms_norm_eps", "sliding_window"))
    theirs = AutoConfig.for_model("mixtral", **TINY)
    assert bare.rotary_config.base == theirs.rope_parameters["rope_theta"] == 1e6
    assert bare.rms_norm_eps == theirs.rms_norm_eps == 1e-5
    assert bare.sliding_window is theirs.sliding_window is None
    assert read({**raw, "sliding_window": 7}).layer_window(3) == 7


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({**MIXTRAL, "num_local_experts": None}, "has no 'num_local_experts'"),
        ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok = 5 must be .* 1 to 4"),
        ({**QWEN2_MOE, "num_experts_per_tok": 0}, "num_experts_per_tok = 0 must be .* 1 to 4"),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": None}, "no 'shared_expert_inter"),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": 0}, "shared_expert_.* = 0 must be"),
        ({**QWEN2_MOE, "qkv_bias": 1}, "qkv_bias = 1 must be true or false"),
        ({**QWEN2_MOE, "norm_topk_prob": "yes"}, "norm_topk_prob = 'yes' must be true or false"),
    ],
)  # fmt: skip
def test_bad_fields_of_experts_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        read({**published("mistral-7b-v0.1"), **TINY, **changes})


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_experts_have_one_activation(name: str) -> None:
    base, changes = ARCHITECTURES[name]
    raw = {**published(base), **TINY, **changes, "hidden_act": "gelu"}
    with pytest.raises(ValueError, match="Unsupported activation: 'gelu' in experts"):
        build(read(raw))


def test_kv_bytes_per_token() -> None:
    # 2 (k and v) * 28 layers * 8 heads * 128 * 2 bytes
    assert QWEN3.kv_bytes_per_token(torch.bfloat16) == 114_688
    assert QWEN3.kv_bytes_per_token(torch.float32) == 229_376
    assert QWEN2.kv_bytes_per_token(torch.bfloat16) == 12_288
    shape = KVShape(QWEN3.num_layers, QWEN3.num_kv_heads, QWEN3.head_dim, page_size=16)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert 16 * QWEN3.kv_bytes_per_token(dtype) == shape.page_bytes(dtype)


def test_the_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        QWEN3.head_dim = 64  # type: ignore[misc]


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    """The config without these fields."""
    return {k: v for k, v in raw.items() if k not in names}


def test_fields_that_may_be_null_or_absent() -> None:
    raw = published("qwen3-0.6b")
    assert read({**raw, "head_dim": None}).head_dim == 64
    assert read(without(raw, "head_dim")).head_dim == 64
    assert read({**raw, "head_dim": None}).rotary_config.rotary_dim == 64
    assert read({**raw, "num_key_value_heads": None}).num_kv_heads == 16
    assert read(without(raw, "num_key_value_heads")).num_kv_heads == 16
    assert read({**raw, "eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert read({**raw, "eos_token_id": None}).eos_token_ids == ()
    assert read(without(raw, "tie_word_embeddings")).tie_word_embeddings is False
    assert read(without(raw, "rope_theta")).rotary_config.base == 10000.0
    half = read({**raw, "partial_rotary_factor": 0.5}).rotary_config
    assert (half.head_dim, half.rotary_dim) == (128, 64)


def test_what_is_missing_or_contradictory_is_named() -> None:
    raw = published("qwen3-0.6b")
    with pytest.raises(UnsupportedModelError, match="config has no 'num_hidden_layers'"):
        read(without(raw, "num_hidden_layers"))
    with pytest.raises(UnsupportedModelError, match="16 is not a multiple of.*= 5"):
        read({**raw, "num_key_value_heads": 5})


def test_biases_follow_the_architecture() -> None:
    def biases(name: str, **changes: Any) -> tuple[bool, bool, bool]:
        config = read({**published(name), **changes})
        return config.attention_bias, config.output_bias, config.mlp_bias

    assert biases("llama-3.1-8b-instruct") == (False, False, False)
    assert biases("llama-3.1-8b-instruct", attention_bias=True) == (True, True, False)
    assert biases("llama-3.1-8b-instruct", mlp_bias=True) == (False, False, True)
    assert biases("mistral-7b-v0.1") == (False, False, False)
    assert biases("qwen2.5-0.5b-instruct") == (True, False, False)
    assert biases("qwen2.5-0.5b-instruct", **QWEN2_MOE) == (True, False, False)
    assert biases("qwen2.5-0.5b-instruct", **QWEN2_MOE, qkv_bias=False) == (False, False, False)
    assert biases("mistral-7b-v0.1", **MIXTRAL, attention_bias=True) == (False, False, False)
    assert biases("qwen3-14b") == (False, False, False)
    assert biases("qwen3-30b-a3b", attention_bias=True) == (True, True, False)


def test_windows_follow_the_architecture() -> None:
    def windows(name: str, **changes: Any) -> list[int | None]:
        config = read({**published(name), "num_hidden_layers": 4, **changes})
        return [config.layer_window(i) for i in range(4)]

    assert windows("mistral-7b-v0.1") == [4096] * 4
    assert windows("mistral-7b-v0.1", sliding_window=None) == [None] * 4
    on = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    for name in ("qwen2.5-0.5b-instruct", "qwen3-0.6b"):
        assert windows(name) == [None] * 4
        assert windows(name, **on) == [None, None, None, 8]
        assert windows(name, **on | {"use_sliding_window": False}) == [None] * 4
    assert windows("qwen3-30b-a3b", **on) == [8] * 4  # as in transformers
    qwen2_moe = {**QWEN2_MOE, **on}
    assert windows("qwen2.5-0.5b-instruct", **qwen2_moe) == [8, None, 8, None]  # likewise
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    layers = {**qwen2_moe, "layer_types": types}
    assert windows("qwen2.5-0.5b-instruct", **layers) == [None, 8, 8, None]
    off = {**layers, "use_sliding_window": False}
    assert windows("qwen2.5-0.5b-instruct", **off) == [None] * 4
    assert windows("mistral-7b-v0.1", **MIXTRAL) == [4096] * 4
    assert windows("llama-3.1-8b-instruct", sliding_window=8) == [None] * 4


def test_sparse_layers_follow_step_and_exceptions() -> None:
    def sparse(**changes: Any) -> list[int]:
        config = read({**published("qwen3-30b-a3b"), "num_hidden_layers": 6, **changes})
        assert config.is_moe == any(config.is_sparse(i) for i in range(6))
        return [i for i in range(6) if config.is_sparse(i)]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[2]) == [5]
    assert sparse(mlp_only_layers=[0, 1, 2, 3, 4, 5]) == []
    assert sparse(num_experts=0) == []
    # transformers 5 writes the number of experts under another name.
    renamed = without(published("qwen3-30b-a3b"), "num_experts")
    assert read({**renamed, "num_local_experts": 128}) == read(published("qwen3-30b-a3b"))


def test_dynamic_ntk_is_refused_beyond_max_position() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    rotary = read({**published("qwen3-0.6b"), "rope_scaling": scaling}).rotary_config
    facts = ModelFacts(torch.float32, rotary.max_context, rope_type(rotary.scaling))
    hardware = Hardware.detect()
    assert resolve(EngineConfig(max_model_len=40960), hardware, facts).max_model_len == 40960
    with pytest.raises(ConfigError, match="40961: .* is 40960, and beyond it dynamic NTK"):
        resolve(EngineConfig(max_model_len=40961), hardware, facts)
