"""The prefix cache, priorities and the overlap loop as users of `LLM` meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import InvalidRequestError
from tests.helpers import TINY, random_prompts, save, tiny_hf_model

[LONG, OTHER] = random_prompts([50, 21], TINY["vocab_size"], 3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "num_pages": 32, "page_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_hf_model("llama", seed=1), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["off", "on"])
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    with LLM(folder, overlap=request.param, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def empty_cache(llm: LLM) -> None:
    while llm.scheduler.has_work:
        llm.scheduler.step()
    llm.reset_prefix_cache()
    llm.scheduler.check_integrity()


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def test_a_conversation_goes_on_from_its_cached_turns(llm: LLM, folder: str) -> None:
    first = generate(llm, LONG)[0]
    follow_up = [*LONG, *first.token_ids, *OTHER]
    second = generate(llm, follow_up)[0]
    assert first.num_cached_tokens == 0
    # The answer's tokens are cached too, but the last one, whose keys nothing needed; in pages.
    assert second.num_cached_tokens == (50 + 20 - 1) // 8 * 8
    with LLM(folder, cache="naive", **OPTIONS) as naive:
        assert generate(naive, follow_up)[0].token_ids == second.token_ids
        assert generate(naive, follow_up)[0].num_cached_tokens == 0


def test_reset_forgets(llm: LLM) -> None:
    outputs = [generate(llm, LONG)[0] for _ in range(2)]
    assert llm.reset_prefix_cache() == 69 // 8
    outputs.append(generate(llm, LONG)[0])
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 0]
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_reset_forgets_what_a_step_in_flight_still_holds(llm: LLM) -> None:
    """With overlap, a request that ends by a token leaves a step in flight behind."""
    free = generate(llm, LONG)[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[free[4]])
    generate(llm, LONG, params)
    assert llm.scheduler.has_work == llm.engine.config.overlap
    assert llm.reset_prefix_cache() > 0
    assert generate(llm, LONG, params)[0].num_cached_tokens == 0


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    salts = [None, "a", "b", "a", None]
    cached = [generate(llm, LONG, cache_salt=salt)[0].num_cached_tokens for salt in salts]
    assert cached == [0, 0, 0, 48, 48]
    together = generate(llm, [LONG] * 3, cache_salt=["a", "c", None])
    assert [output.num_cached_tokens for output in together] == [48, 0, 48]


def test_the_sequences_of_a_prompt_share_it(llm: LLM) -> None:
    before = llm.scheduler.stats.num_prefill_tokens
    params = SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=5, ignore_eos=True)
    [output] = generate(llm, LONG, params)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    assert llm.scheduler.stats.num_prefill_tokens - before == 50 + 3 * 2


def test_prompt_logprobs_are_those_of_a_cold_cache(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=1)
    cold, warm = (generate(llm, LONG, params)[0] for _ in range(2))
    assert warm.num_cached_tokens == 0
    assert len(warm.prompt_logprobs) == 50
    assert warm.prompt_logprobs[1:] == cold.prompt_logprobs[1:]


def test_a_chat_takes_the_same_options(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, priority=1, cache_salt="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": [0]}, "priority has 1 values for 2 prompts: give one for all"),
        ({"cache_salt": ["a", "b", "c"]}, "cache_salt has 3 values for 2 prompts"),
        ({"priority": "high"}, "^priority = 'high' must be an integer"),
        ({"priority": [0, True]}, "prompt 1: priority = True must be an integer"),
        ({"cache_salt": [None, 5]}, "prompt 1: cache_salt = 5 must be a string"),
        ({"priority": [1, None]}, "prompt 1: priority = None must be an integer"),
        ({"cache_salt": ""}, "cache_salt = '' must be a string that is not empty, or None"),
    ],
)
def test_bad_options_raise_before_anything_runs(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        generate(llm, [LONG, OTHER], **options)
    assert not llm.scheduler.has_work


def test_streams_left_early_give_everything_back(llm: LLM) -> None:
    expected = generate(llm, OTHER)[0].token_ids
    streams = [llm.stream(LONG, GREEDY, cache_salt=str(i)) for i in range(3)]
    for stream in streams:
        next(stream)
    assert generate(llm, OTHER, priority=-1)[0].token_ids == expected
    for stream in streams:
        stream.close()
    while llm.scheduler.has_work:
        llm.scheduler.step()
    assert llm.scheduler.num_running == 0
    llm.scheduler.check_integrity()
