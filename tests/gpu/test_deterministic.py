"""With `--deterministic` a request's logits are the same bits, whatever else happens.

The tokens sampled from them and their logprobs follow. Only which of equally likely ones are
listed as alternatives is left open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.core import TokenLogprobs
from tests.gpu.small_models import published_config, record, steps
from tests.helpers import random_prompts
from tools.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.gpu  # needs a CUDA device

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
PROBES = random_prompts([1, 17, 64, 130, 300, 700], SHAPE["vocab_size"], seed=1)
OTHERS = random_prompts([1 + (37 * i) % 150 for i in range(250)], SHAPE["vocab_size"], seed=2)
NUM_TOKENS = 16
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "deterministic": True,
    "page_size": 16,
    "num_pages": 4096,
    "max_model_len": 800,
    "max_running_requests": 8,
}


def params(i: int) -> SamplingParams:
    """Greedy and sampled ones in turn."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 5}
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, **common)
    return SamplingParams(
        temperature=1.0, top_p=0.95, seed=i, presence_penalty=0.5, repetition_penalty=1.1, **common
    )


class Result(NamedTuple):
    """Of `PROBES`."""

    outputs: list[RequestOutput]
    rows: dict[tuple[tuple[int, ...], int], list[torch.Tensor]]
    """Logits `[V]`: see `LogitsRecorder`."""


def run(llm: LLM, num_others: int = 0) -> Result:
    """The probes together behind so many others, in whose place the batch computes them."""
    recorder = record(llm, PROBES)
    others = OTHERS[:num_others]
    each = [*map(params, range(num_others)), *map(params, range(len(PROBES)))]
    outputs = llm.generate([*others, *PROBES], each, use_tqdm=False)
    return Result(outputs[num_others:], recorder.rows)


def facts(entries: Iterable[TokenLogprobs | None]) -> list[tuple[object, ...]]:
    """All but the ids of alternatives, whose order is open where they are equally likely."""
    return [
        (entry.token_id, entry.logprob, entry.rank, [value for _, value in entry.top])
        for entry in entries
        if entry is not None  # as a prompt's first is
    ]


def assert_same(found: Result, expected: Result) -> None:
    """The same bits at every place that both have, and both have all that was sampled from."""
    for prompt in PROBES:
        for count in range(NUM_TOKENS):
            key = tuple(prompt), len(prompt) + count
            first = expected.rows[key][0]
            for row in found.rows[key]:
                differ = int((row.view(torch.int16) != first.view(torch.int16)).sum())
                assert not differ, f"{differ} logits differ after {count} of {len(prompt)} tokens"
    for a, b in zip(found.outputs, expected.outputs, strict=True):
        assert a.token_ids == b.token_ids, f"prompt of {a.num_prompt_tokens}"
        assert a.logprobs is not None and b.logprobs is not None
        assert facts(a.logprobs) == facts(b.logprobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = published_config("qwen3-0.6b") | SHAPE
    return str(make_checkpoint(config, tmp_path_factory.mktemp("qwen3"), scale=0.1))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **{**OPTIONS, "max_running_requests": 256}) as llm:
        assert llm.engine.config.deterministic
        assert llm.engine.config.dtype == torch.bfloat16
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Result:
    """Each probe computed by itself."""
    recorder, outputs = record(llm, PROBES), []
    for i, prompt in enumerate(PROBES):
        outputs += llm.generate(prompt, params(i), use_tqdm=False)
    assert all(len(rows) == 1 for rows in recorder.rows.values())
    return Result(outputs, recorder.rows)


@pytest.mark.parametrize("size", [len(PROBES), 8, 64, 256])
def test_batches(llm: LLM, alone: Result, size: int) -> None:
    llm.reset_prefix_cache()
    before = steps(llm)
    assert_same(run(llm, size - len(PROBES)), alone)
    assert steps(llm).replayed - before.replayed >= NUM_TOKENS - 1


def test_a_cached_prefix(llm: LLM, alone: Result) -> None:
    llm.reset_prefix_cache()
    run(llm)
    found = run(llm)
    # All but the first, which is shorter than a page.
    assert all(output.num_cached_tokens > 0 for output in found.outputs[1:])
    assert_same(found, alone)


def test_prompts_scored_in_pieces(llm: LLM, folder: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    whole = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROBES]
    with LLM(folder, max_prefill_length=64, **OPTIONS) as chunked:
        found = chunked.generate(PROBES, params, use_tqdm=False)
    for a, b in zip(found, whole, strict=True):
        assert a.prompt_logprobs is not None and b.prompt_logprobs is not None
        assert len(a.prompt_logprobs) == a.num_prompt_tokens
        assert facts(a.prompt_logprobs) == facts(b.prompt_logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_length": 64},
        {"page_size": 1, "num_pages": 8192},
        {"page_size": 64},
        {"overlap": "off", "cache": "naive"},
        {"cuda_graph_max_bs": 0},
    ],
    ids=["chunks", "pages-of-1", "pages-of-64", "no-overlap", "no-graphs"],
)
def test_ways_to_compute(folder: str, alone: Result, options: dict[str, Any]) -> None:
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        assert_same(run(llm), alone)
        assert (steps(llm).replayed > 0) == ("cuda_graph_max_bs" not in options)


def test_retraction(folder: str, alone: Result) -> None:
    # A pool that the probes, last in turn, are driven out of again and again.
    small = {"page_size": 4, "num_pages": 400, "max_running_requests": 32}
    with LLM(folder, **{**OPTIONS, **small}) as llm:
        found = run(llm, 20)
        assert llm.scheduler.stats.num_retractions > 0
    assert_same(found, alone)
