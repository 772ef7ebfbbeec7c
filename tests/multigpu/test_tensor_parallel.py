"""Two GPUs, a rank each, over NCCL and peers' memory: the same answers as from one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.errors import EngineDeadError
from tests.gpu.small_models import MODELS, VOCAB, save_small, steps
from tests.helpers import random_prompts

pytestmark = pytest.mark.multigpu  # needs two CUDA devices, a rank each

PROMPTS = random_prompts([5, 90, 17, 40, 3, 61], VOCAB, seed=21)
ROOM: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 128,
    "max_model_len": 256,
    "max_running_requests": 8,
    "max_prefill_length": 64,
}
MEAN_LOGPROB, WORST_LOGPROB = 0.02, 0.3
"""Errors of log-probabilities allowed in bfloat16: sums over ranks are rounded once more, of values
that are rounded to 8 bits some 40 times anyway. Weights of 0.12 keep logits of about 1."""


def params(i: int, num_tokens: int = 24) -> SamplingParams:
    """Greedy, or sampled with a seed and penalties."""
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(
        temperature=0.9, top_p=0.9, seed=i, presence_penalty=0.5, max_tokens=num_tokens,
        ignore_eos=True,
    )  # fmt: skip


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, [params(i) for i in range(len(prompts))], use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_generate_what_one_does(name: str, tmp_path: Path) -> None:
    folder = save_small(name, tmp_path)
    found = []
    for ranks in (1, 2):
        with LLM(folder, dtype="float32", tp=ranks, **ROOM) as llm:
            found.append(tokens(generate(llm)))
            if ranks == 2:
                assert steps(llm).replayed > 0
    assert found[1] == found[0]


@pytest.mark.parametrize("options", [{"overlap": "off"}, {"cuda_graph_max_bs": 0}, {"ep": True}])
def test_ways_to_run(options: dict[str, Any], tmp_path: Path) -> None:
    folder = save_small("qwen3-30b-a3b", tmp_path)
    found = []
    for changes in ({"tp": 1}, {"tp": 2, **options}):
        with LLM(folder, dtype="float32", **ROOM, **changes) as llm:
            found.append(tokens(generate(llm)))
    assert found[1] == found[0]


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_in_bfloat16(name: str, tmp_path: Path) -> None:
    folder = save_small(name, tmp_path, dtype="bfloat16", scale=0.12)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for ranks in (1, 2):
        with LLM(folder, tp=ranks, **ROOM) as llm:
            outputs = llm.generate(PROMPTS, scored, use_tqdm=False)
        entries = [e for output in outputs for e in output.prompt_logprobs or () if e is not None]
        found.append(torch.tensor([entry.logprob for entry in entries]))
    errors = (found[1] - found[0]).abs()
    assert errors.numel() == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert errors.mean() < MEAN_LOGPROB and errors.max() < WORST_LOGPROB, (
        f"mean {errors.mean():.3g}, max {errors.max():.3g}"
    )


# -- decisions -----------------------------------------------------------------------------


class Pair(NamedTuple):
    """The same model on one GPU and on two, with few pages and short chunks."""

    one: LLM
    two: LLM


@pytest.fixture(scope="module", params=["on", "off"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = save_small("qwen3-0.6b", tmp_path_factory.mktemp("qwen3"))
    options = ROOM | {"num_pages": 16, "dtype": "float32", "overlap": request.param}
    # In this order: who was alone before the ranks came stays alone.
    with LLM(folder, **options) as one, LLM(folder, tp=2, **options) as two:
        yield Pair(one, two)


def test_chunks_cache_hits_and_retractions(pair: Pair) -> None:
    prompts = random_prompts([100, 60, 12], VOCAB, seed=5)
    for _ in range(2):
        first, second = (generate(llm, prompts) for llm in pair)
        assert tokens(first) == tokens(second)
        hits = [[output.num_cached_tokens for output in outputs] for outputs in (first, second)]
        assert hits[0] == hits[1]
    assert pair.one.scheduler.stats == pair.two.scheduler.stats
    assert pair.two.scheduler.stats.num_hit_tokens > 0
    assert pair.two.scheduler.stats.num_retractions > 0
    pair.two.scheduler.check_integrity()


def test_a_closed_stream_is_aborted_on_both(pair: Pair) -> None:
    [prompt, other] = random_prompts([20, 9], VOCAB, seed=6)
    taken = []
    for llm in pair:
        stream, kept = llm.stream(prompt, params(0, 80)), llm.stream(other, params(2, 40))
        taken.append([next(chunks).token_ids for _ in range(5) for chunks in (stream, kept)])
        stream.close()
        taken[-1] += [chunk.token_ids for chunk in kept]
        assert llm.scheduler.num_running == 0
    assert taken[0] == taken[1]


# -- ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [None, 0])
def test_a_killed_rank_ends_the_engine_soon(graphs: int | None, tmp_path: Path) -> None:
    folder = save_small("qwen3-0.6b", tmp_path)
    with LLM(folder, tp=2, cuda_graph_max_bs=graphs, **ROOM) as llm:
        stream = llm.stream(PROMPTS[0], params(0, 200))
        next(stream)
        [follower] = [
            child
            for child in psutil.Process().children(recursive=True)
            if "minisgl.scheduler.follower" in child.cmdline()
        ]
        os.kill(follower.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - killed < 10
    assert time.monotonic() - killed < 20  # closed, too
    with LLM(folder, tp=2, **ROOM) as llm:
        assert len(generate(llm)) == len(PROMPTS)
