"""Ranks compute what one process computes, and take the same decisions (CPU, gloo, float32)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import TokenLogprobs
from minisgl.errors import ConfigError
from minisgl.llm import RequestOutput
from tests.helpers import LOGIT_ATOL, TINY, random_prompts, save, tiny_hf_model

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "reference",
    "threads": 1,
    "page_size": 4,
}
ODD: dict[str, Any] = {  # what three ranks can't share evenly
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "hidden_size": 96,
    "intermediate_size": 95,
    "vocab_size": 301,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 30,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "odd llama": ("llama", ODD, (3,)),
    "qwen2": ("qwen2", {}, (2, 4)),  # biases; four ranks share two KV heads
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, (2, 4)),
    "mistral": ("mistral", {"sliding_window": 9, "vocab_size": 319}, (2,)),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **EXPERTS}, (2,)),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 23}, (2,)),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (2,)),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def close(ours: list[TokenLogprobs | None] | None, theirs: Any) -> bool:
    """Whether the ids are the same, and the values up to the tolerance of logits.

    Alternatives are compared by value only: two that are this close may change places.
    """
    if ours is None or theirs is None:
        return ours is theirs
    for our, their in zip(ours, theirs, strict=True):
        if our is None or their is None:
            assert our is their
            continue
        assert our.token_id == their.token_id
        # A token's own score, then those of the best.
        mine = [our.logprob, *(value for _, value in our.top)]
        other = [their.logprob, *(value for _, value in their.top)]
        assert mine == pytest.approx(other, abs=LOGIT_ATOL, rel=0)
    return True


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert our.num_cached_tokens == their.num_cached_tokens
        assert close(our.prompt_logprobs, their.prompt_logprobs)
        for mine, other in zip(our.outputs, their.outputs, strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.finish_reason == other.finish_reason
            assert close(mine.logprobs, other.logprobs)


def work(llm: LLM, vocab_size: int) -> list[RequestOutput]:
    """Greedy and seeded sampling with every kind of parameter, in one batch."""
    prompts = random_prompts([5, 40, 17, 3, 9], vocab_size)
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "logprobs": 3}
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    params = [
        SamplingParams(temperature=0, prompt_logprobs=2, **common),
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, **penalties, **common),
        SamplingParams(temperature=1.0, top_k=20, min_p=0.01, seed=4, n=2, **common),
        SamplingParams(temperature=0, logit_bias={7: 3.0}, **penalties, **common),
    ]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_what_one_process_gives(name: str, tmp_path: Path) -> None:
    kind, changes, sizes = MODELS[name]
    path = save(tiny_hf_model(kind, **changes), tmp_path)
    vocab_size = changes.get("vocab_size", TINY["vocab_size"])
    with LLM(path, num_pages=64, **OPTIONS) as llm:
        expected = work(llm, vocab_size)
    for size in sizes:
        overlap = "on" if size == 2 else "off"
        with LLM(path, num_pages=64, tp=size, overlap=overlap, **OPTIONS) as llm:
            assert_same(work(llm, vocab_size), expected)


def test_the_demo_model_on_three_ranks(demo_model_path: Path) -> None:
    options = {**OPTIONS, "quantization": "none", "num_pages": 32, "max_model_len": 64}
    prompts, found = ["The capital of France is", "Once upon a time"], []
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
    for size in (1, 3):
        with LLM(demo_model_path, tp=size, **options) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
    assert_same(found[1], found[0])


def test_counts_that_heads_do_not_divide_by_are_refused(tmp_path: Path) -> None:
    path = save(tiny_hf_model("llama", **ODD), tmp_path)
    for size in (2, 5, 9, 24):
        with pytest.raises(ConfigError, match=rf"--tp {size}\b.* 12 query heads.* 3 KV heads"):
            LLM(path, tp=size, **OPTIONS)


# -- decisions --------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The same model on one rank and on two, with few pages and short chunks."""

    one: LLM
    two: LLM

    def generate(self, prompts: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
        """The results, which are the same."""
        found = [llm.generate(prompts, params, use_tqdm=False) for llm in self]
        assert_same(*found)
        for llm in self:
            llm.scheduler.check_integrity()
            assert llm.scheduler.num_used_pages == 0
        assert self.one.scheduler.stats == self.two.scheduler.stats
        return found[0]


@pytest.fixture(scope="module", params=["on", "off"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    path = save(tiny_hf_model("llama", vocab_size=319), tmp_path_factory.mktemp("llama"))
    options = {**OPTIONS, "num_pages": 24, "max_prefill_length": 16, "overlap": request.param}
    # In this order: who was alone before the ranks came stays alone.
    with LLM(path, **options) as one, LLM(path, tp=2, **options) as two:
        yield Pair(one, two)


@pytest.fixture(autouse=True)
def nothing_cached(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        one, two = request.getfixturevalue("pair")
        assert one.reset_prefix_cache() == two.reset_prefix_cache()


def test_prompts_are_computed_in_chunks(pair: Pair) -> None:
    steps = pair.two.scheduler.stats.num_steps
    pair.generate(random_prompts([50, 7], 319, 1), SamplingParams(temperature=0, max_tokens=3))
    assert pair.two.scheduler.stats.num_steps - steps >= 4


def test_prefixes_are_shared(pair: Pair) -> None:
    long, other = random_prompts([30, 6], 319, 2)
    pair.generate(long)
    hit, miss = pair.generate([[*long, *other], other])
    assert hit.num_cached_tokens >= 28 and miss.num_cached_tokens == 0
    freed = [llm.reset_prefix_cache() for llm in pair]
    assert freed[0] == freed[1] > 0
    assert pair.generate(long)[0].num_cached_tokens == 0


def test_requests_are_retracted_and_go_on(pair: Pair) -> None:
    before = pair.two.scheduler.stats.num_retractions
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True, logprobs=1)
    pair.generate(random_prompts([9, 14, 5, 11], 319, 3), params)
    assert pair.two.scheduler.stats.num_retractions > before


def test_a_closed_stream_is_aborted_on_all_ranks(pair: Pair) -> None:
    running, prompt = random_prompts([12, 20], 319, 4)
    endless = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    taken = []
    for llm in pair:
        kept, closed = llm.stream(running, endless), llm.stream(prompt, endless)
        taken.append([next(stream).token_ids for _ in range(4) for stream in (kept, closed)])
        closed.close()
        taken[-1] += [chunk.token_ids for chunk in kept]
        assert llm.scheduler.num_running == 0
    assert taken[0] == taken[1]
    pair.generate([prompt, running])  # their pages are free, and hold what they should


def test_a_refused_request_reaches_no_rank(pair: Pair) -> None:
    for llm in pair:
        with pytest.raises(ValueError, match="longest sequence"):
            llm.generate([1] * 300, GREEDY, use_tqdm=False)
    pair.generate([1] * 20)


@pytest.mark.parametrize("size", [1, 2])
def test_no_other_engine_beside_ranks(pair: Pair, size: int, tmp_path: Path) -> None:
    path = save(tiny_hf_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match="--tp 2: close that first"):
        LLM(path, tp=size, **OPTIONS)
    pair.generate([[3, 4, 5]])
