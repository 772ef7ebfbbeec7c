"""Whole models on the native kernels: `transformers`, the reference kernels, and themselves.

In float32 the ids are theirs; with rounded weights, activations or keys, logits are within what
the rounding does. Among themselves, logits are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import Batch, PageWrites, Req
from minisgl.core import SamplingParams as CoreParams
from minisgl.engine import Engine
from minisgl.utils import div_ceil
from tests.helpers import (
    LOGIT_ATOL,
    TINY,
    assert_close,
    engine_logits,
    hf_logits,
    make_engine,
    random_prompts,
    save,
    tiny_hf_model,
)
from tests.unit.gguf_files import VOCAB, Written
from tests.unit.native_weights import assert_same_bits

MAX_TOKENS = 40
PROMPTS = random_prompts([1, 17, 75], TINY["vocab_size"], seed=21)
[IDS] = random_prompts([150], TINY["vocab_size"], seed=22)
"""Three blocks of 64 keys, the last one not whole."""
POSITIONS = list(range(150))

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
}  # fmt: skip


def native_engine(folder: str, **config: Any) -> Engine:
    """With room for 150 tokens."""
    config = {"dtype": "float32", "threads": 1, "page_size": 16, "max_model_len": 256, **config}
    pages = div_ceil(256, config["page_size"])
    engine = make_engine(folder, **{"num_pages": pages, **config})
    assert engine.config.native == (config.get("kernels") != "reference")
    return engine


def logits(folder: str, chunk: int = 256, ids: Sequence[int] = IDS, **config: Any) -> torch.Tensor:
    """Of every position, `[len(ids), V]`, in the configuration's type."""
    engine = native_engine(folder, **config)
    try:
        found = engine_logits(engine, ids, list(range(len(ids))), chunk)
    finally:
        engine.close()
    assert bool(found.isfinite().all())
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all logits: rms error over rms value."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


# -- float32 -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers_and_the_reference(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    model = tiny_hf_model(model_type, seed=3, **changes)
    folder = save(model, tmp_path)
    theirs = hf_logits(model, IDS, POSITIONS)
    for chunk in (256, 13):
        assert_close(logits(folder, chunk), theirs, LOGIT_ATOL, f"chunk {chunk}")
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """QK-norm, two query heads a KV head, a head size that is no multiple of 32; its weights
    are bfloat16 numbers, so that only activations are rounded."""
    model = tiny_hf_model("qwen3", seed=5, head_dim=48, hidden_size=96).bfloat16().float()
    return save(model, tmp_path_factory.mktemp("qwen3"))


def test_bfloat16_is_no_further_from_float32_than_the_reference(folder: str) -> None:
    exact = logits(folder, kernels="reference")
    reference = distance(logits(folder, kernels="reference", dtype="bfloat16"), exact)
    found = distance(logits(folder, dtype="bfloat16"), exact)
    print("BF16", found, reference)
    assert 1e-4 < found < reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantizing_at_load(folder: str, quantization: str, dtype: str) -> None:
    exact = logits(folder, kernels="reference", quantization=quantization)
    found = logits(folder, quantization=quantization, dtype=dtype)
    print("QUANT", quantization, dtype, distance(found, exact))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf(arch: str, tmp_path: Path) -> None:
    kinds = {
        "token_embd.weight": "Q6_K", "output.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0",
        "blk.0.attn_k.weight": "Q5_0", "blk.0.attn_v.weight": "Q4_1", "blk.1.attn_v.weight": "F16",
        "blk.1.ffn_up.weight": "Q8_0", "blk.1.ffn_down.weight": "Q6_K",
        "blk.0.ffn_down.weight": "Q4_K",
    }
    path = Written(tmp_path / "m.gguf", arch, "Q4_0", kinds=kinds).path
    ids = [i % VOCAB for i in IDS]
    exact = logits(path, ids=ids, kernels="reference")
    engine = native_engine(path, dtype="auto", max_model_len=256)
    assert engine.config.quantization == "keep"
    found = engine_logits(engine, ids, POSITIONS, 256)
    print("GGUF", arch, engine.config.dtype, distance(found, exact), exact.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_kv(folder: str, dtype: str, kv_dtype: str) -> None:
    exact = logits(folder, kernels="reference")
    print("KV", dtype, kv_dtype, distance(logits(folder, dtype=dtype, kv_dtype=kv_dtype), exact))
