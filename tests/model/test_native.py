"""Whole models on the native kernels against `transformers` and the reference kernels.

In float32 the ids are theirs. Where weights, activations or keys are rounded, logits are within
what the rounding does; `distance` is the rms error over the rms logit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from tests.helpers import (
    LOGIT_ATOL,
    TINY,
    assert_close,
    engine_logits,
    hf_logits,
    random_prompts,
    save,
    tiny_hf_model,
)
from tests.model.native_logits import distance, logits, native_engine
from tests.unit.gguf_files import (
    EXPERTS,
    FILE_ARCH,
    VOCAB,
    Written,
    has_experts,
    tensor_shapes,
)

MAX_TOKENS = 64
PROMPTS = random_prompts([1, 17, 75], TINY["vocab_size"], seed=21)
[IDS] = random_prompts([150], TINY["vocab_size"], seed=22)
"""Three blocks of 64 keys, the last one not whole."""
POSITIONS = list(range(150))

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-16-by-2": ("llama", {}),
    "llama-64-by-1-tied": (
        "llama",
        {"head_dim": 64, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral-window-24-by-4-gelu-tanh": (
        "mistral",
        {"sliding_window": 9, "head_dim": 24, "num_key_value_heads": 1,
         "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral-window-80-by-2": ("mistral", {"sliding_window": 70, "head_dim": 80}),
    "qwen2-16-by-3": (
        "qwen2",
        {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 70},
    ),
    "qwen3-80-by-2": ("qwen3", {"head_dim": 80, "intermediate_size": 100}),
    "qwen3-32-by-4-gelu-tied": (
        "qwen3",
        {"head_dim": 32, "num_key_value_heads": 1, "hidden_act": "gelu",
         "tie_word_embeddings": True},
    ),
    "llama-24-by-3-odd": (
        "llama",
        {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 51,
         "intermediate_size": 33, "vocab_size": 333, "mlp_bias": True, "attention_bias": True},
    ),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 32, "norm_topk_prob": True, **MOE}),
    "qwen3-moe-17-dense-first": (
        "qwen3_moe",
        {"head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [0], "num_experts": 17,
         "num_experts_per_tok": 5, "moe_intermediate_size": 36},
    ),
    "qwen2-moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen2-moe-every-second": (
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 72, "decoder_sparse_step": 2,
         "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-one": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "mixtral-all": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 5}),
}  # fmt: skip
SEEDS = {"qwen3-moe-17-dense-first": 4, "mixtral-one": 4}
"""Where seed 3 makes two logits nearly tie somewhere."""


# -- float32 -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers_and_the_reference(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    model = tiny_hf_model(model_type, SEEDS.get(case, 3), **changes)
    folder = save(model, tmp_path)
    theirs = hf_logits(model, IDS, POSITIONS)
    for chunk in (256, 13):
        assert_close(logits(folder, IDS, chunk), theirs, LOGIT_ATOL, f"chunk {chunk}")
    outputs = {}
    for kernels in ("auto", "reference"):
        with LLM(folder, dtype="float32", num_pages=64, threads=1, kernels=kernels) as llm:
            assert llm.engine.config.native == (kernels == "auto")
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            found = llm.generate(PROMPTS, params, use_tqdm=False)
            outputs[kernels] = [output.token_ids for output in found]
    assert outputs["auto"] == outputs["reference"]
    for prompt, output in zip(PROMPTS, outputs["auto"], strict=True):
        assert len(output) == MAX_TOKENS
        # If each token is the best after those before it, the whole is what greedy search gives.
        places = range(len(prompt) - 1, len(prompt) + MAX_TOKENS - 1)
        best = hf_logits(model, [*prompt, *output], list(places)).topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 2 * LOGIT_ATOL, "a near-tie"
        assert output == best.indices[:, 0].tolist()


# -- rounded -------------------------------------------------------------------------------

EIGHT_BITS = 0.05
"""Of logits of two or three layers whose products take activations of 8 bits.

Rounding 32 normal numbers to a largest of 127 leaves an rms error of 0.5 %, and so does a sum of
such products; over some ten products one after another that grows to 2 to 3 % (measured).
"""
BFLOAT16 = 0.016
"""The same for activations of bfloat16: 0.17 % each time; measured 0.9 %."""
EXPERTS_EIGHT_BITS, EXPERTS_BFLOAT16 = 0.1, 0.03
"""With experts whose shares of a token are of rounded sums too: measured 5 to 7 %, 2.4 %."""
KEYS = {"float32": 1e-5, "bfloat16": 0.008, "int8": 0.03}
"""For keys and values alone of this type: measured 1e-6, 0.4 %, 1.5 %."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """QK-norm, two query heads a KV head, a head size that is no multiple of 32; its weights
    are bfloat16 numbers, so that only activations are rounded."""
    model = tiny_hf_model("qwen3", seed=5, head_dim=48, hidden_size=96).bfloat16().float()
    return save(model, tmp_path_factory.mktemp("qwen3"))


def test_bfloat16_is_no_further_from_float32_than_the_reference(folder: str) -> None:
    exact = logits(folder, IDS, kernels="reference")
    reference = distance(logits(folder, IDS, kernels="reference", dtype="bfloat16"), exact)
    found = logits(folder, IDS, dtype="bfloat16")
    assert 1e-4 < distance(found, exact) < min(BFLOAT16, reference)
    for chunk in (1, 13):
        assert distance(logits(folder, IDS, chunk, dtype="bfloat16"), exact) < BFLOAT16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_at_load_is_near_the_dequantized_model(
    folder: str, quantization: str, dtype: str
) -> None:
    exact = logits(folder, IDS, kernels="reference", quantization=quantization)
    found = logits(folder, IDS, quantization=quantization, dtype=dtype)
    assert 1e-3 < distance(found, exact) < EIGHT_BITS
    # The weights' own rounding is much more, in 4 bits: it was these weights that ran.
    if quantization == "int4":
        assert distance(found, logits(folder, IDS, kernels="reference")) > 2 * EIGHT_BITS


@pytest.fixture(scope="module", params=["qwen2_moe", "mixtral"])
def all_experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """All experts for every token: with fewer, a rounding may turn who is chosen."""
    changes = {"num_local_experts": 3, "num_experts_per_tok": 3}
    if request.param == "qwen2_moe":
        changes = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                   "shared_expert_intermediate_size": 96}  # fmt: skip
    model = tiny_hf_model(request.param, seed=5, **changes).bfloat16().float()
    return save(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_experts_in_other_types(all_experts: str, quantization: str, dtype: str) -> None:
    exact = logits(all_experts, IDS, kernels="reference", quantization=quantization)
    found = distance(logits(all_experts, IDS, quantization=quantization, dtype=dtype), exact)
    if (quantization, dtype) == ("none", "float32"):
        assert found < 1e-5
    else:
        assert 1e-3 < found < (EXPERTS_BFLOAT16 if quantization == "none" else EXPERTS_EIGHT_BITS)
    if quantization == "int4":  # the weights' own rounding is more: it was these weights that ran
        plain = logits(all_experts, IDS, kernels="reference")
        assert distance(exact, plain) > 2 * EXPERTS_EIGHT_BITS


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mixtral", "qwen2moe", "qwen3moe"])
def test_a_gguf_file_kept_quantized_is_near_the_dequantized_model(
    arch: str, tmp_path: Path
) -> None:
    kinds = {
        "token_embd.weight": "Q6_K", "output.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0",
        "blk.0.attn_k.weight": "Q5_0", "blk.0.attn_v.weight": "Q4_1", "blk.1.attn_v.weight": "F16",
        "blk.1.ffn_up.weight": "Q8_0", "blk.0.ffn_down.weight": "Q4_K",
        "blk.1.ffn_down.weight": "Q6_K",
        # Of experts, gate and up are kept where they are of one type: here in layer 0.
        "blk.0.ffn_down_exps.weight": "Q4_K", "blk.1.ffn_gate_exps.weight": "Q4_1",
        "blk.1.ffn_down_exps.weight": "Q8_0", "blk.0.ffn_up_shexp.weight": "Q8_0",
    }  # fmt: skip
    rng = np.random.default_rng(6)
    # Scores of about 1: larger ones would make attention a choice that a rounding can turn.
    small = {name: rng.normal(0, 0.06, shape) for name, shape in tensor_shapes(arch).items()}
    # All experts, or a rounding could turn who is chosen.
    keys = {f"{FILE_ARCH.get(arch, arch)}.expert_used_count": EXPERTS} if has_experts(arch) else {}
    path = Written(tmp_path / "m.gguf", arch, "Q4_0", keys, kinds=kinds, extra=small).path
    ids = [i % VOCAB for i in IDS]
    exact = logits(path, ids, kernels="reference")
    # A file is kept as it is unless a type is asked for.
    engine = native_engine(path, dtype="auto")
    assert engine.config.quantization == "keep"
    found = engine_logits(engine, ids, POSITIONS, chunk=50)
    engine.close()
    assert 1e-4 < distance(found, exact) < EIGHT_BITS


@pytest.mark.parametrize("kv_dtype", KEYS)
def test_keys_and_values_of_another_type(folder: str, kv_dtype: str) -> None:
    exact = logits(folder, IDS, kernels="reference")
    found = distance(logits(folder, IDS, kv_dtype=kv_dtype), exact)
    assert found < KEYS[kv_dtype]
    assert kv_dtype == "float32" or found > KEYS[kv_dtype] / 10
    # Beside activations of bfloat16, errors add as squares.
    both = distance(logits(folder, IDS, dtype="bfloat16", kv_dtype=kv_dtype), exact)
    assert both**2 < KEYS[kv_dtype] ** 2 + BFLOAT16**2
