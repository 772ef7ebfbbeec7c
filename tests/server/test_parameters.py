"""Each parameter of a request, inside and outside its range."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.server.answers import CHAT, COMPLETIONS, ok, prompt_of, refused

V = 320
"""The tiny model's vocabulary: ids 0 to 319."""
CONTEXT = 256
BOTH = (CHAT, COMPLETIONS)
INT64 = 2**63

ACCEPTED: list[tuple[str, tuple[str, ...], list[Any]]] = [
    ("temperature", BOTH, [0, 1e-6, 0.7, 1, 2, 2.0, None]),
    ("top_p", BOTH, [1e-9, 0.5, 1, None]),
    ("top_k", BOTH, [-1, 0, 1, V, 10**12, None]),
    ("min_p", BOTH, [0, 0.5, 1, None]),
    ("presence_penalty", BOTH, [-2, 0, 2, None]),
    ("frequency_penalty", BOTH, [-2, 0, 2, None]),
    ("repetition_penalty", BOTH, [1e-3, 1, 1.3, 100, None]),
    ("seed", BOTH, [-INT64, -1, 0, INT64 - 1, None]),
    ("n", BOTH, [1, 2, 128, None]),
    ("best_of", BOTH, [1, None]),
    ("max_tokens", BOTH, [1, 2, None]),
    ("max_completion_tokens", BOTH, [2, None]),
    ("min_tokens", BOTH, [0, 1, 2, None]),
    ("stop", BOTH, ["a", ["a"], [], [f"{i}" for i in range(16)], "é", None]),
    ("stop_token_ids", BOTH, [[], [0], [V - 1, 0], None]),
    ("include_stop_str_in_output", BOTH, [True, False, None]),
    ("ignore_eos", BOTH, [True, False, None]),
    ("skip_special_tokens", BOTH, [True, False, None]),
    ("logit_bias", BOTH, [{}, {"0": -100, f"{V - 1}": 100}, {"7": 0.5}, None]),
    ("prompt_logprobs", BOTH, [0, 5, 20, None]),
    ("logprobs", (CHAT,), [True, False, None]),
    ("logprobs", (COMPLETIONS,), [0, 20, None]),
    ("top_logprobs", (CHAT,), [None]),
    ("echo", (COMPLETIONS,), [True, False, None]),
    ("echo", (CHAT,), [False]),
    ("stream", BOTH, [False, None]),
    ("stream_options", BOTH, [None]),
    ("priority", BOTH, [-(2**31), 0, 2**31 - 1, None]),
    ("cache_salt", BOTH, ["mine", None]),
    ("user", BOTH, ["me", None]),
    ("store", BOTH, [True, False, None]),
    ("metadata", BOTH, [{}, {"a": "b"}, None]),
    ("service_tier", BOTH, ["auto", None]),
    ("response_format", BOTH, [{"type": "text"}, None]),
    ("structured_outputs", BOTH, [None]),
    ("tools", (CHAT,), [[], None]),
    ("tool_choice", (CHAT,), ["none", "auto", None]),
    ("parallel_tool_calls", (CHAT,), [True, False, None]),
    ("add_generation_prompt", (CHAT,), [True, False, None]),
    ("continue_final_message", (CHAT,), [True, False, None]),
    ("chat_template_kwargs", (CHAT,), [{}, {"enable_thinking": False}, None]),
    ("model", BOTH, ["tiny", None]),
    ("prompt", (COMPLETIONS,), ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [0] * (CONTEXT - 1)]),
]
WRONG_TYPES: list[Any] = ["x", "1", [], {}, [1]]
NO_NUMBER = [*WRONG_TYPES, True]
NO_COUNT = [*NO_NUMBER, 1.5]
NO_SWITCH = ["true", 1, 0, [], {}]
REFUSED: list[tuple[str, tuple[str, ...], list[Any]]] = [
    ("temperature", BOTH, [-0.001, 2.001, 1e30, *NO_NUMBER]),
    ("top_p", BOTH, [0, -1, 1.001, *NO_NUMBER]),
    ("top_k", BOTH, [-2, INT64, *NO_COUNT]),
    ("min_p", BOTH, [-0.001, 1.001, *NO_NUMBER]),
    ("presence_penalty", BOTH, [-2.001, 2.001, *NO_NUMBER]),
    ("frequency_penalty", BOTH, [-2.001, 2.001, *NO_NUMBER]),
    ("repetition_penalty", BOTH, [0, -1, *NO_NUMBER]),
    ("seed", BOTH, [INT64, *NO_COUNT]),
    ("n", BOTH, [0, -1, 129, INT64 - 1, *NO_COUNT]),
    ("best_of", BOTH, [0, 2, 129, *NO_COUNT]),
    ("max_tokens", BOTH, [0, -1, INT64, *NO_COUNT]),
    ("max_completion_tokens", BOTH, [0, -1, 3, INT64, *NO_COUNT]),
    ("min_tokens", BOTH, [-1, 3, INT64, *NO_COUNT]),
    ("stop", BOTH, ["", [""], ["a", ""], ["a"] * 17, [1], 1, {}, True]),
    ("stop_token_ids", BOTH, [[-1], [V], [INT64], ["1"], [1.5], [True], 1, "1", {}]),
    ("include_stop_str_in_output", BOTH, NO_SWITCH),
    ("ignore_eos", BOTH, NO_SWITCH),
    ("skip_special_tokens", BOTH, NO_SWITCH),
    (
        "logit_bias",
        BOTH,
        [{f"{V}": 1}, {"-1": 1}, {"x": 1}, {"": 1}, {"1.5": 1}, {"1": 100.1}, {"1": "1"}]
        + [{"1": None}, {"1": True}, {"9" * 40: 1}, {"01": 1, "1": 1}, [], "x", 1],
    ),
    ("prompt_logprobs", BOTH, [-1, 21, *NO_COUNT]),
    ("logprobs", (CHAT,), NO_SWITCH),
    ("logprobs", (COMPLETIONS,), [-1, 21, *NO_COUNT]),
    ("top_logprobs", (CHAT,), [0, 5, -1, 21, *NO_COUNT]),
    ("echo", (COMPLETIONS,), NO_SWITCH),
    ("echo", (CHAT,), [True]),
    ("stream", BOTH, NO_SWITCH),
    ("stream_options", BOTH, [{}, {"include_usage": True}, [], "x", True]),
    ("priority", BOTH, [-(2**31) - 1, 2**31, *NO_COUNT]),
    ("cache_salt", BOTH, ["", "x" * 257, 1, [], True]),
    ("user", BOTH, [1, [], True]),
    ("store", BOTH, ["yes", 1, []]),
    ("metadata", BOTH, ["x", 1, []]),
    ("service_tier", BOTH, [1, []]),
    (
        "response_format",
        BOTH,
        [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {"type": "poem"}]
        + [{}, "text", True],
    ),
    ("structured_outputs", BOTH, [{"regex": "a+"}, {"grammar": "root ::= 'a'"}, {}]),
    ("guided_regex", BOTH, ["a+"]),
    ("guided_grammar", BOTH, ["root ::= 'a'"]),
    ("tools", (CHAT,), [[{"type": "function", "function": {"name": "f"}}], {}, "x"]),
    ("tool_choice", (CHAT,), ["required", {"type": "function", "function": {"name": "f"}}, 1]),
    ("parallel_tool_calls", (CHAT,), ["yes", 1]),
    ("tools", (COMPLETIONS,), [[{"type": "function", "function": {"name": "f"}}]]),
    ("add_generation_prompt", (CHAT,), NO_SWITCH),
    ("continue_final_message", (CHAT,), NO_SWITCH),
    ("chat_template_kwargs", (CHAT,), [{"messages": []}, {"bos_token": "x"}, "x", [], 1]),
    ("model", BOTH, [1, [], True]),
    (
        "prompt",
        (COMPLETIONS,),
        ["", [], [""], [[]], ["a", ""], [[1], []], [V], [[V]], [-1], [1.5], [True], [INT64]]
        + [["a", [1]], [1, "a"], 1, {}, True, [{}], [0] * CONTEXT, ["a", [0]], ["a"] * 1025],
    ),
    ("best", BOTH, [1]),
    ("tempersture", BOTH, [1]),
]


def _cases(table: list[tuple[str, tuple[str, ...], list[Any]]]) -> list[Any]:
    """One test for a parameter of an endpoint: of all values, there are some hundreds."""
    return [
        pytest.param(path, name, values, id=f"{path.split('/')[2]}-{name}")
        for name, paths, values in table
        for path in paths
    ]


def request(path: str, name: str, value: Any) -> dict[str, Any]:
    """A request of two tokens, unless the parameter says otherwise."""
    return {**prompt_of(path), "max_tokens": 2, name: value}


@pytest.mark.parametrize(("path", "name", "values"), _cases(ACCEPTED))
def test_accepted(tiny: httpx.Client, path: str, name: str, values: list[Any]) -> None:
    for value in values:
        choices = ok(tiny.post(path, json=request(path, name, value)))["choices"]
        expected = value if name == "n" and value else 1
        if name == "prompt" and isinstance(value, list) and type(value[0]) is not int:
            expected = len(value)
        assert [choice["index"] for choice in choices] == list(range(expected))
        assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}


@pytest.mark.parametrize(("path", "name", "values"), _cases(REFUSED))
def test_refused(tiny: httpx.Client, path: str, name: str, values: list[Any]) -> None:
    for value in values:
        message = refused(tiny.post(path, json=request(path, name, value)), param=name)
        assert re.search(rf"{name}|token id|template variable", message)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("digits", ["1e400", "-1e400", "1" * 400, f"{2**64}", "NaN", "Infinity"])
def test_a_number_that_no_parameter_can_hold_is_refused(
    tiny: httpx.Client, path: str, digits: str
) -> None:
    text = json.dumps({**prompt_of(path), "seed": "?"}).replace('"?"', digits)
    refused(tiny.post(path, content=text, headers={"content-type": "application/json"}))


def test_what_excludes_each_other_is_refused(tiny: httpx.Client) -> None:
    chat, text = prompt_of(CHAT), prompt_of(COMPLETIONS)
    for path, body, param in (
        (CHAT, {**chat, "top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        (CHAT, {**chat, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {**chat, "max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
        (
            CHAT,
            {**chat, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (COMPLETIONS, {**text, "n": 2, "best_of": 3}, "best_of"),
        (COMPLETIONS, {**text, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ):
        refused(tiny.post(path, json=body), param=param)
    ok(tiny.post(CHAT, json={**chat, "max_tokens": 2, "max_completion_tokens": 2}))
    ok(tiny.post(COMPLETIONS, json={**text, "max_tokens": 1, "n": 2, "best_of": 2}))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [7] * 300}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [7] * 300][1:]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(
    tiny: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    message = refused(tiny.post(path, json=body), param=param)
    assert re.search(r"\b3[01]\d tokens", message) and str(CONTEXT) in message
