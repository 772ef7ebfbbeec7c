"""The parameters of OpenAI requests: their ranges and defaults, what is refused, and the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minisgl.errors import InvalidRequestError
from minisgl.params import SamplingParams
from minisgl.server.errors import to_api_error
from minisgl.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.unit.protocol_requests import USER, chat, completion, refusal

INT64 = 2**63

MAKERS = [chat, completion]

ACCEPTED = [
    ("temperature", [0, 0.0, 1e-7, 1, 2, 2.0]),
    ("top_p", [1e-9, 0.5, 1]),
    ("top_k", [-1, 0, 1, 50, INT64 - 1]),
    ("min_p", [0, 0.5, 1]),
    ("presence_penalty", [-2, 0.5, 2]),
    ("frequency_penalty", [-2, 0.5, 2]),
    ("repetition_penalty", [1e-3, 1, 10.0]),
    ("seed", [-INT64, -1, 0, INT64 - 1]),
    ("n", [1, 128]),
    ("max_tokens", [1, INT64 - 1]),
    ("min_tokens", [0, 5]),
    ("prompt_logprobs", [0, 20]),
    ("stop_token_ids", [[], [0, 2], list(range(128))]),
    ("ignore_eos", [True, False]),
    ("include_stop_str_in_output", [True]),
    ("skip_special_tokens", [False]),
]

REFUSED = [
    ("temperature", [-0.1, 2.1, "1", True, [1], float("nan"), float("inf"), 10**400]),
    ("top_p", [0, -0.1, 1.01, "0.5", False]),
    ("top_k", [-2, 1.0, 1.5, "5", True, INT64]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, {}]),
    ("repetition_penalty", [0, -1, float("inf")]),
    ("seed", [-INT64 - 1, INT64, 1.0, "1", True]),
    ("n", [0, -1, 129, 10**30, 1.0, True, "2"]),
    ("max_tokens", [0, -1, 2.0, "16", True, INT64]),
    ("max_completion_tokens", [0, "16"]),
    ("min_tokens", [-1, 1.5]),
    ("prompt_logprobs", [-1, 21, True]),
    ("stop", ["", [""], ["a", ""], ["x"] * 17, 5, [5], {"a": "b"}]),
    ("stop_token_ids", [5, [-1], [1.0], [True], ["5"], [INT64]]),
    ("logit_bias", [[], {"5": 101}, {"5": -100.5}, {"5": "1"}, {"5": True}, {"5": float("nan")}]),
    ("stop", ["x" * 1025, ["x" * 1025], "\ud800"]),
    ("stop_token_ids", [[5] * 129]),
    ("logit_bias", [{str(i): 1 for i in range(1025)}, {"5": 10**400}, {"9" * 19: 1}]),
    ("logit_bias", [{"a": 1}, {"-1": 1}, {"": 1}, {"1.0": 1}, {"\u0661": 1}, {"1": 1, "01": 2}]),
    ("ignore_eos", [1, 0, "true"]),
    ("include_stop_str_in_output", ["yes"]),
    ("skip_special_tokens", [1]),
    ("stream", [1, "true"]),
    ("priority", [2**31, -(2**31) - 1, 1.5, "high"]),
    ("cache_salt", ["", "x" * 257, 5]),
    ("model", [5, ["m"]]),
    ("user", [5]),
    ("metadata", [[]]),
    ("store", ["yes"]),
]


def pairs(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("name", "value"), pairs(ACCEPTED))
def test_a_value_in_its_range_reaches_the_engine(make: Any, name: str, value: Any) -> None:
    given_value = getattr(make(**{name: value}).to_params(), name)
    assert (list(given_value) if isinstance(given_value, tuple) else given_value) == value


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("name", "value"), pairs(REFUSED), ids=lambda value: repr(value)[:30])
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(
    make: Any, name: str, value: Any
) -> None:
    error = refusal(make, **{name: value})
    assert error.param == name
    assert name in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_left_out_or_null_gets_the_defaults_of_sampling_params(make: Any) -> None:
    assert make().to_params() == SamplingParams()
    nulls = dict.fromkeys([*ChatCompletionRequest.model_fields, "tools", "some_new_parameter"])
    del nulls["messages"]
    assert make(**nulls).to_params() == SamplingParams()


@pytest.mark.parametrize("make", MAKERS)
def test_an_unknown_parameter_is_refused_by_name(make: Any) -> None:
    error = refusal(make, max_token=5)
    assert error.param == "max_token"
    assert "max_tokens" in error.message
    assert refusal(make, frobnicate=5).param == "frobnicate"


def test_stop_may_be_a_string_or_a_list() -> None:
    assert chat(stop="a").to_params().stop == ("a",)
    assert completion(stop=["a", "b"]).to_params().stop == ("a", "b")


def test_logit_bias_keys_become_token_ids() -> None:
    assert chat(logit_bias={"50256": -100, "7": 0.5}).to_params().logit_bias == {
        50256: -100,
        7: 0.5,
    }


@pytest.mark.parametrize("make", MAKERS)
def test_max_completion_tokens_is_another_name_for_max_tokens(make: Any) -> None:
    assert make(max_completion_tokens=5).to_params().max_tokens == 5
    assert make(max_completion_tokens=5, max_tokens=5).to_params().max_tokens == 5
    error = refusal(make, max_completion_tokens=5, max_tokens=6)
    assert "5" in error.message and "6" in error.message


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert refusal(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


def test_best_of_must_equal_n() -> None:
    assert completion(best_of=2, n=2).to_params().n == 2
    assert refusal(completion, best_of=2).param == "best_of"


def test_n_has_the_servers_own_limit_too() -> None:
    chat(n=4).check_n(4)
    with pytest.raises(InvalidRequestError, match="n = 5 .*4.*--max-n") as caught:
        chat(n=5).check_n(4)
    assert caught.value.param == "n"


@pytest.mark.parametrize("make", MAKERS)
def test_stream_options_need_a_stream(make: Any) -> None:
    options = make(stream=True, stream_options={"include_usage": True}).stream_options
    assert options.include_usage and not options.continuous_usage_stats
    assert refusal(make, stream_options={"include_usage": True}).param == "stream_options"
    error = refusal(make, stream=True, stream_options={"include_use": True})
    assert error.param == "stream_options"
    assert "stream_options" in error.message and "include_usage" in error.message
    assert refusal(make, stream=True, stream_options=[]).param == "stream_options"
    assert refusal(make, stream=True, stream_options={"include_usage": 1}).param == "stream_options"


# -- logprobs ----------------------------------------------------------------------------------


def test_chat_logprobs_are_a_switch_and_a_count() -> None:
    assert chat().to_params().logprobs is None
    assert chat(logprobs=False).to_params().logprobs is None
    assert chat(logprobs=True).to_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).to_params().logprobs == 20
    for fields in ({"top_logprobs": 5}, {"top_logprobs": 5, "logprobs": False}):
        assert refusal(chat, **fields).param == "top_logprobs"
    for count in (-1, 21, 1.0, "5", True):
        assert refusal(chat, logprobs=True, top_logprobs=count).param == "top_logprobs"
    assert refusal(chat, logprobs=5).param == "logprobs"


def test_completion_logprobs_are_a_count() -> None:
    assert completion(logprobs=0).to_params().logprobs == 0
    assert completion(logprobs=20).to_params().logprobs == 20
    for count in (-1, 21, True, 1.0):
        assert refusal(completion, logprobs=count).param == "logprobs"


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completion(echo=True).to_params().prompt_logprobs is None
    assert completion(logprobs=3).to_params().prompt_logprobs is None
    assert completion(echo=True, logprobs=3).to_params().prompt_logprobs == 3
    assert completion(echo=True, logprobs=3, prompt_logprobs=5).to_params().prompt_logprobs == 5


# -- features that are not there ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", 1),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_grammar", "root ::= 'a'"),
        ("guided_choice", ["a"]),
        ("regex", "a"),
        ("ebnf", "a"),
        ("json_schema", "{}"),
        ("use_beam_search", True),
        ("length_penalty", 1.5),
        ("length_penalty", True),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content"}),
    ],
)
def test_a_feature_that_is_not_there_is_refused(name: str, value: Any) -> None:
    error = refusal(chat, **{name: value})
    assert error.param == name
    assert "this version has no" in error.message


def test_neutral_values_of_such_features_are_accepted() -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "length_penalty": 1.0,
        "use_beam_search": False,
    }
    assert chat(**neutral).to_params() == SamplingParams()
    assert completion(suffix="", response_format={"type": "text"}).to_params() == SamplingParams()
    assert refusal(completion, suffix="end").param == "suffix"


# -- the schema --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_the_schema_describes_every_parameter_and_allows_null(model: Any) -> None:
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is False
    for name, field in schema["properties"].items():
        assert field["description"], name
        if name not in schema["required"]:
            kinds = field.get("anyOf", [])
            assert {"type": "null"} in kinds or None in field.get("enum", []), name
            assert "default" in field or "enum" in field, name


def test_the_schema_has_the_ranges() -> None:
    fields = ChatCompletionRequest.model_json_schema()["properties"]
    number, null = fields["temperature"]["anyOf"]
    assert number == {"type": "number", "minimum": 0, "maximum": 2}
    assert null == {"type": "null"}
    assert fields["top_p"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert fields["n"]["default"] == 1
    assert fields["response_format"]["enum"] == [{"type": "text"}, None]
    assert "guided_json" not in fields


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(ChatCompletionRequest.model_fields)), value=JSON)
def test_whatever_a_parameter_holds_it_is_accepted_or_refused_with_a_short_reason(
    name: str, value: Any
) -> None:
    body = {"messages": [USER], name: value}
    try:
        ChatCompletionRequest.model_validate(body).to_params()
    except (ValidationError, InvalidRequestError) as caught:
        error = to_api_error(caught)
        assert error.status == 400
        assert len(error.message) < 500
        json.dumps(error.message, allow_nan=False).encode()
