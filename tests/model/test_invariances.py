"""A request's result does not depend on what runs beside it, nor on how it is cut or paged,
cached, retracted, or read a step late."""

from __future__ import annotations

import pytest

from minisgl import LLM, SamplingParams
from tests.model.invariance import (
    FLOAT32,
    MATRIX,
    MAX_TOKENS,
    MODELS,
    NUM_PROMPTS,
    PAGES,
    PROMPTS,
    REFERENCE,
    ROUNDED,
    Model,
    check,
    check_cell,
    make_model,
    params,
)

# Every model on the kernels that are its default, the native ones; two more on the reference
# kernels, one in each other type.
VARIANTS = {
    **{name: (name, FLOAT32) for name in MODELS},
    "mistral-reference": ("mistral-window", REFERENCE),
    "moe-reference": ("qwen3-moe", REFERENCE),
    **{f"mistral-{name}": ("mistral-window", config) for name, config in ROUNDED.items()},
}


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, config = VARIANTS[request.param]
    return make_model(name, tmp_path_factory.mktemp(request.param), config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def test_the_reference_is_not_trivial(model: Model) -> None:
    # Were all answers alike, or sampling greedy, the comparisons below would say little.
    assert len({tuple(output.token_ids) for output in model.alone}) == NUM_PROMPTS
    stopped = [len(output.token_ids) for output in model.alone if output.finish_reason == "stop"]
    assert len(set(stopped)) > 2 and min(stopped) >= 3
    with LLM(model.folder, threads=1, num_pages=64, **model.config) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS[1::2], greedy, use_tqdm=False)
    pairs = zip(outputs, model.alone[1::2], strict=True)
    assert sum(a.token_ids != b.token_ids for a, b in pairs) > NUM_PROMPTS // 4


def test_batch_of_64_equals_one_by_one(model: Model) -> None:
    stats = check(model, num_pages=PAGES, max_running_requests=64)
    assert stats.num_retractions == 0


@pytest.mark.parametrize("budget", [16, 17, 100])
def test_chunked_prefill_equals_whole(model: Model, budget: int) -> None:
    # One prompt takes up to three steps of 16 tokens, between others' decoding.
    check(model, num_pages=PAGES, max_prefill_length=budget, max_running_requests=16)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_page_size_does_not_matter(model: Model, page_size: int) -> None:
    # 64 requests of up to 101 tokens, so that pages are used again by others.
    check(
        model, page_size=page_size, num_pages=4096 // page_size, max_prefill_length=200,
        max_running_requests=40,
    )  # fmt: skip


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 130), (4, 40), (16, 16)])
def test_retraction_does_not_matter(model: Model, page_size: int, num_pages: int) -> None:
    # 130 to 256 tokens of cache for 64 requests that grow to 25 to 101 tokens.
    stats = check(
        model, page_size=page_size, num_pages=num_pages, max_prefill_length=48,
        max_running_requests=32,
    )  # fmt: skip
    assert stats.num_retractions > 0


def test_several_sequences_of_one_prompt(model: Model) -> None:
    prompt, common = PROMPTS[9], {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    several = SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=6, **common)
    single = SamplingParams(temperature=0.8, top_p=0.9, seed=5, **common)
    with LLM(model.folder, threads=1, num_pages=64, **model.config) as llm:
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


@pytest.mark.parametrize(("page_size", "budget", "cache", "retraction", "overlap"), MATRIX)
def test_matrix(
    llama: Model, page_size: int, budget: int, cache: str, retraction: bool, overlap: bool
) -> None:
    check_cell(llama, page_size, budget, cache, retraction, overlap)


@pytest.mark.parametrize(("page_size", "budget"), [(1, 16), (16, 4096)])
def test_everything_at_once_on_each_model(model: Model, page_size: int, budget: int) -> None:
    check_cell(model, page_size, budget, "radix", retraction=True, overlap=True)
