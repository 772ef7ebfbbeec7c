"""Greedy tokens and logits equal those of `transformers`, for every architecture and variant.

The models are tiny and random, in float32. Greedy ids can only be compared where the two best
logits are further apart than both implementations' error; that is asserted first, and seeds
are such that it holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from minisgl import LLM, SamplingParams
from minisgl.errors import ConfigError
from minisgl.models import load_weight
from tests.helpers import (
    LOGIT_ATOL,
    TINY,
    assert_close,
    engine_logits,
    hf_greedy,
    hf_logits,
    make_engine,
    random_prompts,
    save,
    tiny_hf_model,
)

MAX_TOKENS = 64
# One token, one page and one token (pages of 16), and some pages.
PROMPTS = random_prompts([1, 17, 40], TINY["vocab_size"], seed=5)

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_MOE = {**MOE, "shared_expert_intermediate_size": 40}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Shorter than the prompts, so that the window moves during prefill and during decoding.
WINDOW = {"sliding_window": 9}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(base: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    """The field of transformers 5, which holds base and scaling."""
    return {"rope_parameters": {"rope_theta": base, "rope_type": "default", **scaling}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-base": ("llama", rope(500000.0)),
    "llama-linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": ("llama", rope(rope_type="dynamic", factor=4.0)),
    "llama-llama3": ("llama", {"tie_word_embeddings": True, **rope(500000.0, **LLAMA3)}),
    "llama-yarn": ("llama", rope(**YARN)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {**WINDOW, "head_dim": 24}),
    "mistral-tied-window": ("mistral", {**WINDOW, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, **WINDOW}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen2-yarn": ("qwen2", rope(1e6, **YARN)),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    ),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, **rope(1e6, **YARN)}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, **MOE}),
    "qwen3-moe-dense-first": (
        "qwen3_moe",
        {"head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": False, **MOE},
    ),
    "qwen3-moe-every-second": (
        "qwen3_moe",
        {"head_dim": 16, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3],
         "norm_topk_prob": True, "tie_word_embeddings": True, "attention_bias": True, **MOE},
    ),
    "qwen3-moe-window": (
        "qwen3_moe", {"head_dim": 16, "use_sliding_window": True, **WINDOW, **MOE},
    ),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe-tied-no-bias": (
        "qwen2_moe",
        {**QWEN2_MOE, "qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen2-moe-every-second": (
        "qwen2_moe",
        {**QWEN2_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "qwen2-moe-window": (
        "qwen2_moe", {**QWEN2_MOE, "use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-one-expert": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "mixtral-window": ("mixtral", {**MIXTRAL, **WINDOW, "head_dim": 24}),
    "mixtral-tied-yarn": (  # transformers' yarn needs a head_dim that is not null
        "mixtral", {**MIXTRAL, "tie_word_embeddings": True, "head_dim": 16, **rope(1e6, **YARN)},
    ),
}  # fmt: skip
SEEDS = {
    "llama-yarn": 2, "mistral-tied-window": 1, "qwen2-moe-tied-no-bias": 1, "mixtral": 2,
    "mixtral-defaults": 2, "4.x-qwen2-moe": 1,
}  # fmt: skip
"""Where seed 0 makes two logits nearly tie somewhere."""


def assert_same_greedy(model: Any, folder: str) -> None:
    """The engine's batch of all prompts gives what transformers gives for each alone."""
    with LLM(folder, dtype="float32", num_pages=64, max_prefill_length=64, threads=1) as llm:
        assert llm.engine.config.native
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        theirs = hf_greedy(model, prompt, MAX_TOKENS)
        # Each side may be off by the tolerance, in opposite directions.
        assert theirs.smallest_gap > 2 * LOGIT_ATOL, "the model's seed makes a near-tie"
        assert output.token_ids == theirs.token_ids
        assert len(output.token_ids) == MAX_TOKENS


@pytest.mark.parametrize("case", CASES)
def test_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    model = tiny_hf_model(model_type, SEEDS.get(case, 0), **changes)
    assert_same_greedy(model, save(model, tmp_path))


EXPERTS = {
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, **MOE}),
    "qwen2-moe": ("qwen2_moe", {**QWEN2_MOE, "norm_topk_prob": False}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-one-expert": ("mixtral", {**MIXTRAL, "num_experts_per_tok": 1}),
}


def skew_routing(model: Any) -> None:
    """Make the routers rank the experts 2, 0, 1, 3 for all tokens.

    A router has no bias, so all embeddings get a large first dimension, which alone it looks at.
    The head doesn't, or all tokens would have much the same logits.
    """
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] += 8.0
        model.lm_head.weight[:, 0] = 0.0
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[0] = 1.0
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.tensor([0.1, 0.0, 0.2, -0.1])


def chosen_experts(model: Any, prompt: list[int]) -> list[list[int]]:
    """Of each layer the sorted experts that any token of the prompt is sent to."""
    chosen: list[list[int]] = []

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        chosen.append(output[2].unique().tolist())

    hooks = [layer.mlp.gate.register_forward_hook(look) for layer in model.model.layers]
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return chosen


@pytest.mark.parametrize("skewed", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize("case", EXPERTS)
def test_logits_of_experts_equal_transformers(case: str, skewed: bool, tmp_path: Path) -> None:
    model_type, changes = EXPERTS[case]
    model = tiny_hf_model(model_type, SEEDS.get(case, 0), **changes)
    prompt = random_prompts([70], TINY["vocab_size"], seed=7)[0]
    if skewed:
        skew_routing(model)
    used = [0, 2][-changes["num_experts_per_tok"] :] if skewed else [0, 1, 2, 3]
    assert chosen_experts(model, prompt) == [used] * 3  # no token to any other
    folder = save(model, tmp_path)
    engine = make_engine(folder, dtype="float32", num_pages=8, threads=1)
    theirs = hf_logits(model, prompt, range(70))
    for chunk in (70, 16, 1):
        assert_close(engine_logits(engine, prompt, range(70), chunk), theirs, LOGIT_ATOL, case)
    engine.close()
    assert_same_greedy(model, folder)


def test_the_shared_expert_counts(tmp_path: Path) -> None:
    # Were it or its gate left out, logits would be far off.
    model = tiny_hf_model("qwen2_moe", **QWEN2_MOE)
    prompt = random_prompts([20], TINY["vocab_size"], seed=7)[0]
    full = hf_logits(model, prompt, range(20))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.shared_expert_gate.weight.zero_()  # a half for all tokens
    half = hf_logits(model, prompt, range(20))
    assert (full - half).abs().max() > 100 * LOGIT_ATOL
    engine = make_engine(save(model, tmp_path), dtype="float32", num_pages=8, threads=1)
    assert_close(engine_logits(engine, prompt, range(20), 20), half, LOGIT_ATOL)
    engine.close()


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen2-moe", "mixtral"])
def test_experts_that_transformers_saved_packed(case: str, tmp_path: Path) -> None:
    model_type, changes = EXPERTS[case]
    model = tiny_hf_model(model_type, **changes)
    original = dict(load_weight(save(model, tmp_path / "original"), "cpu"))
    model.save_pretrained(tmp_path / "packed", save_original_format=False)
    packed = dict(load_weight(str(tmp_path / "packed"), "cpu"))
    assert packed.keys() == original.keys()
    assert all(torch.equal(packed[name], original[name]) for name in packed)
    with safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118


# The same models under the configs of other times: null and absent fields, the 4.x layout.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "head-dim-null": ("llama", {}, {"head_dim": None}),
    "head-dim-absent": ("mistral", WINDOW, {"head_dim": ...}),
    "kv-heads-absent": ("llama", {"num_key_value_heads": 4}, {"num_key_value_heads": ...}),
    "4.x-default": (
        "qwen3", {"head_dim": 32, **rope(1e6)},
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None},
    ),
    "4.x-yarn": (
        "qwen2", rope(1e6, **YARN),
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": YARN},
    ),
    "4.x-type": (
        "llama", rope(20000.0, rope_type="linear", factor=4.0),
        {"rope_parameters": ..., "rope_theta": 20000.0,
         "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "4.x-experts": ("qwen3_moe", {"head_dim": 16, **MOE},
                    {"num_local_experts": ..., "num_experts": 4}),
    "4.x-mixtral": (
        "mixtral", {**MIXTRAL, **rope(5e5)},
        {"rope_parameters": ..., "rope_theta": 5e5, "sliding_window": ..., "head_dim": ...},
    ),
    "mixtral-defaults": (
        "mixtral", MIXTRAL, {"rope_parameters": ..., "rms_norm_eps": ..., "sliding_window": ...},
    ),
    "4.x-qwen2-moe": (
        "qwen2_moe", {**QWEN2_MOE, **rope(1e6)},
        {"rope_parameters": ..., "rope_theta": 1e6, "qkv_bias": ..., "norm_topk_prob": ...,
         "layer_types": ..., "mlp_only_layers": ..., "decoder_sparse_step": ...},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_greedy_ids_do_not_depend_on_how_the_config_is_written(case: str, tmp_path: Path) -> None:
    model_type, changes, fields = CONFIGS[case]
    model = tiny_hf_model(model_type, SEEDS.get(case, 0), **changes)
    assert_same_greedy(model, save(model, tmp_path, **fields))


LENGTH = 8192
POSITIONS = [0, 1, 100, 1023, 1024, 2047, 4095, 5000, 8191]
LONG: dict[str, Any] = {
    "max_position_embeddings": LENGTH, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
FROM_1K = {"original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "default": rope(1e6),
    "linear": rope(rope_type="linear", factor=4.0),
    "dynamic": rope(rope_type="dynamic", factor=4.0),
    "llama3": rope(500000.0, **{**LLAMA3, **FROM_1K}),
    "yarn": rope(1e6, **{**YARN, **FROM_1K, "factor": 8.0}),
    "yarn-overrides": rope(
        10000.0, **{**YARN, **FROM_1K, "factor": 8.0}, attention_factor=1.3, beta_fast=16.0,
        beta_slow=2.0, truncate=False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def long_prompt() -> list[int]:
    return random_prompts([LENGTH], TINY["vocab_size"], seed=9)[0]


@pytest.fixture(scope="module")
def unscaled(long_prompt: list[int]) -> torch.Tensor:
    """Logits of the same weights with plain RoPE: what a variant that is ignored would give."""
    return hf_logits(tiny_hf_model("llama", **LONG), long_prompt, POSITIONS)


@pytest.mark.parametrize("variant", ROPES)
def test_logits_equal_transformers_up_to_8k(
    variant: str, long_prompt: list[int], unscaled: torch.Tensor, tmp_path: Path
) -> None:
    model = tiny_hf_model("llama", **LONG, **ROPES[variant])
    theirs = hf_logits(model, long_prompt, POSITIONS)
    engine = make_engine(
        save(model, tmp_path),
        dtype="float32",
        num_pages=LENGTH // 16,
        max_model_len=LENGTH,
        threads=1,
    )
    assert engine.config.native
    ours = engine_logits(engine, long_prompt, POSITIONS, chunk=1500)
    engine.close()
    assert_close(ours, theirs, LOGIT_ATOL, variant)
    if variant == "dynamic":  # plain RoPE up to max_position_embeddings
        assert_close(ours, unscaled, LOGIT_ATOL, variant)
    else:  # were the variant ignored, the test would see it at any position but the first
        assert (theirs - unscaled)[1:].abs().amax(dim=-1).min() > 100 * LOGIT_ATOL


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_window_is_exact_to_the_token(kernels: str, tmp_path: Path) -> None:
    # Greedy ids might survive a window off by one; logits at its edge do not.
    prompt = random_prompts([40], TINY["vocab_size"], seed=3)[0]
    model = tiny_hf_model("mistral", **WINDOW)
    positions = list(range(40))
    theirs = hf_logits(model, prompt, positions)
    for window, same in ((9, True), (8, False), (10, False)):
        folder = save(model, tmp_path / str(window), sliding_window=window)
        engine = make_engine(folder, dtype="float32", num_pages=8, threads=1, kernels=kernels)
        assert engine.config.native == (kernels == "auto")
        # Whole, and in chunks that end inside, at and beyond the window.
        for chunk in (40, 7, 9):
            ours = engine_logits(engine, prompt, positions, chunk)
            if same:
                assert_close(ours, theirs, LOGIT_ATOL, f"chunk {chunk}")
            else:
                first = min(window, 9)  # positions below it see all keys either way
                assert_close(ours[:first], theirs[:first], LOGIT_ATOL)
                assert (ours[first] - theirs[first]).abs().max() > 100 * LOGIT_ATOL
        engine.close()


def test_dynamic_ntk_is_refused_beyond_its_context(tmp_path: Path) -> None:
    folder = save(tiny_hf_model("llama", **CASES["llama-dynamic"][1]), tmp_path)
    with pytest.raises(ConfigError, match="context is 256, and beyond it dynamic NTK angles"):
        LLM(folder, dtype="float32", max_model_len=257)
