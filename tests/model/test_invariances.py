"""A request's result does not depend on what runs beside it, nor on how it is cut or paged.

Token ids are compared exactly, logprobs to a tolerance: a GEMM library sums a row in another
order when the batch has another size. The tokens could only differ where two logits, or a
uniform number and a border of the distribution, lie within that error; the seeds below have
no such place (one that had would fail every time, not now and then).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.core import TokenLogprobs
from tests.helpers import TINY, random_prompts, save, tiny_hf_model

LOGPROB_ATOL = 1e-4
"""As for logits (see `tests.helpers.LOGIT_ATOL`); log-softmax adds at most as much again."""
NUM_PROMPTS = 64
MAX_TOKENS = 12
# Of 1 to 40 tokens: shorter and longer than chunks (16), pages (16) and the window (9).
PROMPTS = random_prompts([1 + (7 * i) % 40 for i in range(NUM_PROMPTS)], TINY["vocab_size"], 11)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
}  # fmt: skip
PAGES = 256
"""Of 16 tokens: enough for all 64 requests at once (at most 52 tokens each)."""


def params(i: int) -> SamplingParams:
    """Even prompts greedy, odd ones sampled with a seed of their own; some with logprobs."""
    common: dict[str, Any] = {
        "max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 3 if i % 3 == 0 else None,
        "prompt_logprobs": 2 if i % 4 == 0 else None,
    }  # fmt: skip
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, **common)
    return SamplingParams(temperature=0.8, top_p=0.9, seed=1000 + i, **common)


class Model(NamedTuple):
    """A saved model and what its requests give one by one, with everything at its default."""

    folder: str
    alone: list[RequestOutput]


def run(folder: str, **config: Any) -> tuple[list[RequestOutput], int]:
    """All prompts together; returns the outputs and how often one was retracted."""
    with LLM(folder, dtype="float32", threads=1, **config) as llm:
        each = [params(i) for i in range(NUM_PROMPTS)]
        outputs = llm.generate(PROMPTS, each, use_tqdm=False)
        return outputs, llm.scheduler.num_retractions


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_type, changes = MODELS[request.param]
    reference = tiny_hf_model(model_type, seed=4, num_hidden_layers=2, **changes)
    folder = save(reference, tmp_path_factory.mktemp(request.param))
    with LLM(folder, dtype="float32", threads=1, num_pages=64) as llm:
        alone = [
            llm.generate(prompt, params(i), use_tqdm=False)[0] for i, prompt in enumerate(PROMPTS)
        ]
    return Model(folder, alone)


def assert_same_logprobs(x: TokenLogprobs, y: TokenLogprobs) -> None:
    """Equal up to the tolerance; two tokens that tie within it may have changed places."""
    assert x.token_id == y.token_id
    assert abs(x.rank - y.rank) <= 1
    assert len(x.top) == len(y.top)
    values = [x.logprob, *(value for _, value in x.top)]
    expected = [y.logprob, *(value for _, value in y.top)]
    assert values == pytest.approx(expected, abs=LOGPROB_ATOL, rel=0)
    top = dict(y.top)
    for token, value in x.top:
        assert value == pytest.approx(top.get(token, y.top[-1][1]), abs=LOGPROB_ATOL, rel=0)


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Equal ids, and logprobs of the same tokens within the tolerance."""
    assert len(ours) == len(theirs) == NUM_PROMPTS
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.token_ids == b.token_ids, f"prompt {i}"
        assert len(a.token_ids) == MAX_TOKENS
        assert a.finish_reason == b.finish_reason == "length"
        for mine, other, count in (
            (a.logprobs, b.logprobs, MAX_TOKENS if i % 3 == 0 else None),
            (a.prompt_logprobs, b.prompt_logprobs, len(PROMPTS[i]) if i % 4 == 0 else None),
        ):
            assert (mine is None) == (other is None) == (count is None)
            if mine is None or other is None:
                continue
            assert len(mine) == len(other) == count, f"prompt {i}"
            for x, y in zip(mine, other, strict=True):
                if x is None or y is None:  # a prompt's first token has no logprob
                    assert x is y
                    continue
                assert_same_logprobs(x, y)


def test_the_reference_is_not_trivial(model: Model) -> None:
    # Were all answers alike, or sampling greedy, the comparisons below would say little.
    assert len({tuple(output.token_ids) for output in model.alone}) == NUM_PROMPTS
    with LLM(model.folder, dtype="float32", threads=1, num_pages=64) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS[1::2], greedy, use_tqdm=False)
    pairs = zip(outputs, model.alone[1::2], strict=True)
    assert sum(a.token_ids != b.token_ids for a, b in pairs) > NUM_PROMPTS // 4


def test_batch_of_64_equals_one_by_one(model: Model) -> None:
    outputs, retractions = run(model.folder, num_pages=PAGES, max_running_requests=64)
    assert retractions == 0
    assert_same(outputs, model.alone)


@pytest.mark.parametrize("budget", [16, 17, 100])
def test_chunked_prefill_equals_whole(model: Model, budget: int) -> None:
    # One prompt takes up to three steps of 16 tokens, between others' decoding.
    outputs, _ = run(
        model.folder, num_pages=PAGES, max_prefill_length=budget, max_running_requests=16
    )
    assert_same(outputs, model.alone)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_page_size_does_not_matter(model: Model, page_size: int) -> None:
    # 64 requests of up to 52 tokens, so that pages are used again by others.
    outputs, _ = run(
        model.folder, page_size=page_size, num_pages=2048 // page_size, max_prefill_length=200,
        max_running_requests=40,
    )  # fmt: skip
    assert_same(outputs, model.alone)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 130), (4, 30), (16, 8)])
def test_retraction_does_not_matter(model: Model, page_size: int, num_pages: int) -> None:
    # Some 120 tokens of cache for 64 requests that grow to 13 to 52 tokens.
    outputs, retractions = run(
        model.folder, page_size=page_size, num_pages=num_pages, max_prefill_length=48,
        max_running_requests=32,
    )  # fmt: skip
    assert retractions > 0
    assert_same(outputs, model.alone)


def test_several_sequences_of_one_prompt(model: Model) -> None:
    prompt, common = PROMPTS[9], {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    several = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=6, **common)
    single = SamplingParams(temperature=0.8, top_p=0.9, seed=5, **common)
    with LLM(model.folder, dtype="float32", threads=1, num_pages=64) as llm:
        first = llm.generate(prompt, several, use_tqdm=False)[0].outputs
        # Again, beside others: the same seed gives the same six.
        again = llm.generate([PROMPTS[3], prompt], [params(3), several], use_tqdm=False)[1].outputs
        alone = llm.generate(prompt, single, use_tqdm=False)[0]
        greedy = SamplingParams(temperature=0.0, n=3, **common)
        same = llm.generate(prompt, greedy, use_tqdm=False)[0].outputs
    assert [output.index for output in first] == list(range(6))
    assert [output.token_ids for output in first] == [output.token_ids for output in again]
    assert len({tuple(output.token_ids) for output in first}) == 6
    assert first[0].token_ids == alone.token_ids  # choice 0 of a seed is that seed's request
    assert same[0].token_ids == same[1].token_ids == same[2].token_ids
