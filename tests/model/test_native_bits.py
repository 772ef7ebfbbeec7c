"""On the native kernels a token's logits are the same bits, whatever else is computed with them,
how its prompt is cut, and where its keys lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.helpers import TINY, engine_logits, random_prompts, save, tiny_hf_model
from tests.model.native_logits import batch_logits, logits, native_engine
from tests.unit.native_weights import assert_same_bits

[IDS] = random_prompts([150], TINY["vocab_size"], seed=31)
TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4-int8-keys": {"dtype": "bfloat16", "quantization": "int4", "kv_dtype": "int8"},
    "bfloat16-keys": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "float32-keys": {"dtype": "bfloat16", "kv_dtype": "float32"},
    "deterministic": {"dtype": "bfloat16", "kv_dtype": "int8", "deterministic": True},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    # A window that begins inside a block of 64 keys, heads that share blocks of 32 outputs.
    "mistral-window": (
        "mistral", {"sliding_window": 70, "head_dim": 24, "num_attention_heads": 8}
    ),
    # More experts than the tokens of a decode meet, one of another size for all.
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 96},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    model_type, changes = MODELS[request.param]
    model = tiny_hf_model(model_type, seed=7, num_hidden_layers=2, **changes)
    return save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=TYPES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TYPES[request.param]


def test_chunks_and_page_sizes(folder: str, config: dict[str, Any]) -> None:
    whole = logits(folder, IDS, **config)
    for page_size, chunks in ((1, (64,)), (2, (7,)), (3, (1,)), (16, (1, 13, 149)), (64, (50,))):
        for chunk in chunks:
            found = logits(folder, IDS, chunk, page_size=page_size, **config)
            assert_same_bits(found, whole, f"page size {page_size}, chunks of {chunk}")


def test_threads(folder: str, config: dict[str, Any]) -> None:
    one = logits(folder, IDS, 60, **config)
    for threads in (2, 3):
        assert_same_bits(logits(folder, IDS, 60, **{**config, "threads": threads}), one, "threads")


@pytest.mark.parametrize("threads", [1, 3])
def test_batches(folder: str, config: dict[str, Any], threads: int) -> None:
    prompts = random_prompts([2 + (37 * i) % 90 for i in range(64)], TINY["vocab_size"], seed=32)
    prompts = [IDS, *prompts[1:]]
    # Up to the last token, so that the second step decodes; every third prompt has a longer rest.
    prefilled = [max(1, len(p) - (9 if i % 3 == 2 else 1)) for i, p in enumerate(prompts)]
    engine = native_engine(
        folder, num_pages=64 * 16, max_running_requests=64, **{**config, "threads": threads}
    )
    alone = [batch_logits(engine, [p], [n])[0] for p, n in zip(prompts, prefilled, strict=True)]
    whole = logits(folder, IDS, **config)
    assert_same_bits(alone[0], whole, "alone")
    for size in (2, 7, 32, 64):
        found = batch_logits(engine, prompts[:size], prefilled[:size])
        for i in range(size):
            assert_same_bits(found[i], alone[i], f"request {i} of {size}")
    # And in another place of the batch.
    found = batch_logits(engine, prompts[::-1], prefilled[::-1])
    for i in range(64):
        assert_same_bits(found[63 - i], alone[i], f"request {i}, backwards")
    # All decoding, when a token's heads are attended to together.
    decoding = batch_logits(engine, [IDS] * 64, [149] * 64)
    for row in decoding:
        assert_same_bits(row, whole, "64 decoding")
    engine.close()


def test_what_a_page_held_before_does_not_matter(folder: str, config: dict[str, Any]) -> None:
    whole = logits(folder, IDS, 60, **config)
    engine = native_engine(folder, **config)
    pool = engine._pool
    if pool.data.dtype.is_floating_point:
        pool.data.fill_(float("nan"))
    else:
        pool.data.fill_(-128)
    if pool.scales is not None:
        pool.scales.fill_(float("nan"))
    positions = list(range(len(IDS)))
    assert_same_bits(engine_logits(engine, IDS, positions, 60), whole, "after NaN")
    engine.close()


def test_greedy_tokens_are_those_of_the_logits(folder: str, config: dict[str, Any]) -> None:
    # Greedy requests take a shorter way, without logits, unless one in the step needs them.
    prompts = [IDS[: 3 + 5 * i] for i in range(9)]
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    with LLM(folder, num_pages=64, threads=2, cache="naive", **config) as llm:
        assert llm.engine.config.native
        short = llm.generate(prompts, plain, use_tqdm=False)
        long = llm.generate(prompts, scored, use_tqdm=False)
    for a, b in zip(short, long, strict=True):
        assert a.token_ids == b.token_ids
        assert b.logprobs is not None
        assert [entry.rank for entry in b.logprobs if entry] == [1] * 20


def test_equal_logits_give_the_lowest_id(tmp_path: Path) -> None:
    model = tiny_hf_model("llama", seed=8)
    with torch.no_grad():  # every token has three more with its row of the head, over panels
        model.lm_head.weight.copy_(model.lm_head.weight[:80].repeat(4, 1))
    folder = save(model, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for threads in (1, 3):
        with LLM(folder, dtype="float32", num_pages=64, threads=threads) as llm:
            outputs = llm.generate([IDS[:9], IDS[9:20]], params, use_tqdm=False)
        found = [token for output in outputs for token in output.token_ids]
        assert max(found) < 80 and len(set(found)) > 5
