"""Messages, template variables and prompts of OpenAI requests, and what known clients send."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.errors import InvalidRequestError
from minisgl.server.errors import to_api_error
from minisgl.server.protocol import ChatCompletionRequest
from tests.unit.protocol_requests import USER, chat, completion, refusal

# -- messages ----------------------------------------------------------------------------------


def test_messages_are_given_on_as_they_came() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}],
            "name": "Ada",
            "type": "text",
        },
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "Four"},
    ]
    assert chat(messages=messages).to_messages() == messages


def test_null_keys_of_messages_are_left_out_and_developer_is_system() -> None:
    given_messages = [{"role": "developer", "content": "Be brief.", "name": None, "x": None}]
    expected = [{"role": "system", "content": "Be brief."}]
    assert chat(messages=given_messages).to_messages() == expected


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ["messages"]),
        ("Hi", ["messages", "list"]),
        ({}, ["messages", "list"]),
        (["Hi"], ["messages[0]", "object"]),
        ([USER, {"content": "x"}], ["messages[1].role", "required"]),
        ([{"role": "robot", "content": "x"}], ["messages[0].role", "'robot'", "'user'"]),
        ([{"role": 5, "content": "x"}], ["messages[0].role"]),
        ([{"role": "user"}], ["messages[0]", "content"]),
        ([{"role": "user", "content": None}], ["messages[0]", "content"]),
        ([{"role": "assistant", "content": None}], ["messages[0]", "content"]),
        ([{"role": "user", "content": 5}], ["messages[0].content", "5"]),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            ["messages[0].content", "image_url", "[0]", "no images"],
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], ["messages[0].content", "[0]"]),
        ([{"role": "user", "content": ["x"]}], ["messages[0].content", "[0]"]),
        ([{"role": "user", "content": "x", "name": 5}], ["messages[0].name"]),
        ([{"role": "assistant", "tool_calls": [5]}], ["messages[0].tool_calls[0]"]),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, words: list[str]) -> None:
    error = refusal(chat, messages=messages)
    assert error.param == "messages"
    for word in words:
        assert word in error.message


def test_messages_are_required() -> None:
    for fields in ({}, {"messages": None}):
        with pytest.raises(ValidationError) as caught:
            ChatCompletionRequest.model_validate(fields)
        assert to_api_error(caught.value).message == "messages is required"


def test_a_prompt_is_generated_for_or_the_last_message_continued() -> None:
    assert chat().add_generation_prompt is None
    assert chat(add_generation_prompt=False, continue_final_message=True).continue_final_message
    error = refusal(chat, add_generation_prompt=True, continue_final_message=True)
    assert error.param == "continue_final_message"


# -- template variables ------------------------------------------------------------------------


def test_template_variables_are_those_that_the_server_allows() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False})
    assert request.template_kwargs() == {"enable_thinking": False}
    request.check_template_kwargs(("enable_thinking",))
    with pytest.raises(InvalidRequestError, match="'enable_thinking'.*thinking") as caught:
        request.check_template_kwargs(("thinking",))
    assert caught.value.param == "chat_template_kwargs"


def test_reasoning_effort_is_a_template_variable() -> None:
    request = chat(reasoning_effort="low")
    assert request.template_kwargs() == {"reasoning_effort": "low"}
    with pytest.raises(InvalidRequestError) as caught:
        request.check_template_kwargs(())
    assert caught.value.param == "reasoning_effort"
    assert refusal(chat, reasoning_effort="huge").param == "reasoning_effort"
    same = chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"})
    assert same.template_kwargs() == {"reasoning_effort": "low"}
    error = refusal(chat, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert error.param == "reasoning_effort"


# -- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["x"] * 1024, ["x"] * 1024),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        5,
        {},
        True,
        [True],
        [1, True],
        [-1],
        [1, -1],
        [1.0],
        [1, 1.0],
        [[1, "a"]],
        [[[1]]],
        ["a", [1]],
        [[1], "a"],
        [1, "a"],
        ["x"] * 1025,
    ],
    ids=lambda prompt: repr(prompt)[:20],
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert error.param == "prompt"
    assert error.message.startswith("prompt = ")
    assert len(error.message) < 300


# -- the requests of known clients -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "body"),
    [
        # vllm bench serve
        (
            completion,
            {
                "model": "m",
                "temperature": 0.0,
                "best_of": 1,
                "max_tokens": 16,
                "logprobs": None,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "repetition_penalty": 1.0,
            },
        ),
        (
            chat,
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "max_completion_tokens": 16,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
        ),
        # guidellm names the length twice
        (
            chat,
            {
                "max_tokens": 16,
                "max_completion_tokens": 16,
                "stop": None,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        ),
        # aiperf
        (chat, {"max_completion_tokens": 16, "min_tokens": 16, "stream": False}),
        # lm-evaluation-harness scores a prompt
        (
            completion,
            {
                "prompt": [[1, 2, 3]],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            },
        ),
        (chat, {"messages": [{**USER, "type": "text"}], "temperature": 0, "stop": ["\n\n"]}),
        # LangChain
        (chat, {"n": 1, "stream": True, "stream_options": {"include_usage": True}}),
        # what the openai package has no effect for here
        (
            chat,
            {
                "user": "u",
                "store": False,
                "metadata": {"a": "b"},
                "service_tier": "auto",
                "safety_identifier": "s",
                "prompt_cache_key": "k",
            },
        ),
    ],
)
def test_what_known_clients_send_is_accepted(make: Any, body: dict[str, Any]) -> None:
    assert make(**body).to_params().n == 1
