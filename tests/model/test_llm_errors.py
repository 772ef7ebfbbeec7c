"""`LLM` with bad input: a message that names it, and nothing lost by it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import (
    ChatTemplateError,
    ConfigError,
    InvalidRequestError,
    MinisglError,
    ModelNotFoundError,
)

VOCABULARY = 49_152
GREEDY = SamplingParams(temperature=0, max_tokens=2)
CONTEXT = 64


@pytest.fixture(scope="module")
def llm(demo_model_path: Any) -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", num_pages=8, max_model_len=CONTEXT) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].token_ids


@pytest.fixture(autouse=True)
def nothing_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no work left, all pages free, and the same answer as ever."""
    yield
    if "llm" not in request.fixturenames:
        return
    llm, expected = request.getfixturevalue("llm"), request.getfixturevalue("expected")
    assert llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].token_ids == expected
    assert not llm.scheduler.has_work
    assert not llm._sequences
    cache = llm.scheduler._cache
    assert cache.num_available_pages == cache.num_pages == 8


def refused(llm: LLM, prompts: Any, params: Any = GREEDY) -> str:
    """The message of the error that `generate` raises; no request was queued for it."""
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.scheduler.has_work
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", ["no tokens"]),
        (["", ""], ["prompt 0: ", "no tokens"]),
        ([[]], ["no tokens"]),
        ([VOCABULARY], [str(VOCABULARY), f"vocabulary of {VOCABULARY}"]),
        ([1, -1], ["-1"]),
        ([1, 2**70], [str(2**70)]),
        ([[1, True]], ["True"]),
        ([[1, 2.0]], ["2.0"]),
        ([["a"]], ["'a'"]),
        ("half \ud800 a character", ["surrogate", r"\ud800"]),
        (None, ["NoneType"]),
        (5, ["int"]),
        (b"bytes", ["bytes"]),
        ({"prompt": "x"}, ["dict"]),
    ],
    ids=repr,
)
def test_bad_prompts(llm: LLM, prompt: Any, named: list[str]) -> None:
    message = refused(llm, prompt)
    for word in named:
        assert word in message


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([1, VOCABULARY], str(VOCABULARY)),
        ([-5], "-5"),
        ([True], "True"),
        ([1] * CONTEXT, f"{CONTEXT} tokens"),
        ("\udfff", "surrogate"),
        (5, "5"),
        (None, "None"),
        (True, "True"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_prompt_among_good_ones_is_named_before_any_runs(
    llm: LLM, bad: Any, named: str
) -> None:
    message = refused(llm, ["good", [1, 2], bad, "good"])
    assert message.startswith("prompt 2: ")
    assert named in message


def test_a_prompt_too_long_names_both_lengths(llm: LLM) -> None:
    message = refused(llm, [1] * CONTEXT)
    assert f"{CONTEXT} tokens" in message
    assert f"longest sequence of {CONTEXT}" in message
    [output] = llm.generate([1] * (CONTEXT - 1), GREEDY, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_params_lists_of_another_length(llm: LLM) -> None:
    for count in (0, 1, 3):
        message = refused(llm, ["a", "b"], [GREEDY] * count)
        assert "2 prompts" in message
        assert str(count) in message


@pytest.mark.parametrize("params", ["x", 5, {"temperature": 0}, [None], [{"n": 1}]], ids=repr)
def test_params_of_a_wrong_type(llm: LLM, params: Any) -> None:
    refused(llm, ["a"], params)


@pytest.mark.parametrize("wrong", [None, {"temperature": 0}], ids=repr)
def test_params_of_a_wrong_type_within_a_list_are_named(llm: LLM, wrong: Any) -> None:
    assert refused(llm, ["a", "b"], [GREEDY, wrong]).startswith("prompt 1: ")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"stop_token_ids": [VOCABULARY]}, f"stop_token_ids = {VOCABULARY}"),
        ({"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias = {VOCABULARY}"),
    ],
    ids=repr,
)
def test_ids_in_params_outside_the_vocabulary(llm: LLM, wrong: Any, named: str) -> None:
    params = SamplingParams(**wrong)
    assert named in refused(llm, "a", params)
    assert refused(llm, ["a", "b"], [GREEDY, params]).startswith("prompt 1: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", None),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 10**400),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", [""]),
        ("stop", [5]),
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", [1]),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_parameters_out_of_range_are_refused_when_made(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} = ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_the_callers_params_stay_as_they_are(llm: LLM) -> None:
    stop, bias = ["\n"], {5: 1.0}
    params = SamplingParams(max_tokens=2, stop=stop, logit_bias=bias, stop_token_ids=[7])
    before = copy.deepcopy(params)
    llm.generate(["a", "b"], params, use_tqdm=False)
    list(llm.stream("a", params))
    refused(llm, ["a", ""], params)
    assert params == before
    assert (stop, bias) == (["\n"], {5: 1.0})


def test_the_callers_prompts_stay_as_they_are(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    llm.generate(prompts, GREEDY, use_tqdm=False)
    assert prompts == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "conversation",
    [
        [],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        ["hello"],
    ],
    ids=repr,
)
def test_bad_conversations(llm: LLM, conversation: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(conversation, GREEDY, use_tqdm=False)
    good = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError, match="^prompt 1: "):
        llm.chat([good, conversation], GREEDY, use_tqdm=False)


def test_template_options_may_not_replace_the_messages(llm: LLM) -> None:
    with pytest.raises(ChatTemplateError, match="bos_token"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, bos_token="x")


def test_bad_streams_raise_at_the_call(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        llm.stream("")
    with pytest.raises(InvalidRequestError, match="n = 2"):
        llm.stream("a", SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="-1"):
        llm.stream([1, -1])
    with pytest.raises(InvalidRequestError):
        llm.stream(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        llm.stream([])
    assert not llm.scheduler.has_work


def test_streams_left_early_give_everything_back(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stream = llm.stream([1, 2, 3], params)
    next(stream)
    assert llm.scheduler.num_running == 1
    stream.close()  # type: ignore[attr-defined]
    assert llm.scheduler.num_running == 0


def test_a_stream_closed_before_its_first_chunk_gives_everything_back(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    stream.close()  # type: ignore[attr-defined]
    assert (llm.scheduler.num_waiting, llm.scheduler.num_running) == (0, 0)


def test_two_streams_at_once_and_a_call_in_between(llm: LLM, expected: list[int]) -> None:
    one, two = llm.stream([1, 2, 3], GREEDY), llm.stream([1, 2, 3], GREEDY)
    first = [next(one), next(two)]
    assert llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].token_ids == expected
    for chunk, rest in zip(first, (one, two), strict=True):
        assert chunk.token_ids + [token for c in rest for token in c.token_ids] == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"temprature": 1}, "'temprature'"),
        ({"page_size": 0}, "--page-size = 0"),
        ({"page_size": True}, "--page-size = True"),
        ({"page_size": "16"}, "--page-size = '16'"),
        ({"tp": 2}, "--tp 2: the model has 9 query heads"),
        ({"dtype": "int8"}, "--dtype = 'int8'"),
        ({"dtype": None}, "--dtype = None"),
        ({"memory_ratio": 0}, "--memory-ratio = 0"),
        ({"max_model_len": 8193}, "8193"),
        ({"max_running_requests": 9, "max_prefill_length": 8}, "9"),
        ({"num_pages": 1, "max_model_len": 8192}, "8192"),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("demo_model_path")
def test_bad_options(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("smollm2", **config)
    assert named in str(caught.value)


def test_no_such_model() -> None:
    with pytest.raises(ModelNotFoundError, match="'nothing-here'"):
        LLM("nothing-here")


@pytest.mark.usefixtures("demo_model_path")
def test_nothing_works_after_close_and_closing_twice_does() -> None:
    with LLM("smollm2", dtype="float32", num_pages=4, max_model_len=CONTEXT) as llm:
        pass
    llm.close()
    for call in (
        lambda: llm.generate("a", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        lambda: llm.stream("a"),
    ):
        with pytest.raises(MinisglError, match="closed"):
            call()
