"""Chats with thinking models: what of an answer is reasoning, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig
from minisgl.server.errors import to_api_error
from minisgl.server.openai import OpenAIService
from minisgl.server.protocol import ChatCompletionRequest, CompletionRequest
from minisgl.server.responses import ChatCompletion, ChatCompletionChunk
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.parts import TokenizerParts
from tests.unit.fake_async_engine import (
    FakeAsyncEngine,
    Step,
    answer,
    byte_tokenizer,
    fake_context,
)

HELLO = [{"role": "user", "content": "Hi"}]
QWEN = "{% if enable_thinking is false %}...{% endif %}"  # sources; the fake renders by itself
Json = dict[str, Any]


class Engine(FakeAsyncEngine):
    """Answers with `text`; `head` is what the chat template ends a prompt with."""

    def __init__(self, text: str, head: str = "", *, template: str | None = QWEN) -> None:
        super().__init__(lambda _ids, _choice: answer(text), max_prompt_len=999)
        self.ready = msgspec.structs.replace(self.ready, max_model_len=1000)
        self.tokenizer = with_template(template)
        self._head = head

    async def encode_chat(self, messages: list[Json], **options: Any) -> list[int]:
        ids = await super().encode_chat(messages, **options)
        if options["continue_final_message"]:
            return ids[:-1]  # without the end of the line
        return [*ids, *self._head.encode()]


def with_template(template: str | None, *special_tokens: str) -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(list(special_tokens))
    return Tokenizer(TokenizerParts(backend, {}, {"default": template} if template else {}))


def results(engine: FakeAsyncEngine, body: Json, **config: Any) -> list[Json]:
    """The answer, or its chunks, as a client would read them."""

    async def run() -> list[Any]:
        service = OpenAIService(fake_context(engine, **config))
        request = ChatCompletionRequest.model_validate({"messages": HELLO, **body})
        async with await service.chat(request) as call:
            if not request.stream:
                return [await call.response()]
            return [chunk async for chunks in call.chunks() for chunk in chunks]

    shapes = TypeAdapter(ChatCompletionChunk if body.get("stream") else ChatCompletion)
    parsed: list[Json] = json.loads(msgspec.json.encode(asyncio.run(run())))
    for result in parsed:
        shapes.validate_python(result, strict=True)
    return parsed


def message(engine: FakeAsyncEngine, body: Json | None = None, **config: Any) -> Json:
    [whole] = results(engine, body or {}, **config)
    answered: Json = whole["choices"][0]["message"]
    return answered


def deltas(engine: FakeAsyncEngine, body: Json | None = None) -> list[Json]:
    chunks = results(engine, {**(body or {}), "stream": True})
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def parts(answered: Json) -> tuple[Any, Any]:
    return answered["reasoning_content"], answered["content"]


# -- whole answers -----------------------------------------------------------------------------


def test_what_is_thought_stands_beside_the_content() -> None:
    answered = message(Engine("<think>\nI see. \n</think>\n\nYes"))
    assert answered == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "I see.",
        "refusal": None,
    }


@pytest.mark.parametrize("text", ["\n Yes", "<think>\n\n</think>\n\n\n Yes"])
def test_without_a_thought_there_is_null(text: str) -> None:
    assert message(Engine(text))["reasoning_content"] is None


def test_an_answer_that_ends_in_mid_thought_has_no_content() -> None:
    engine = Engine("")
    engine.script = lambda _ids, _choice: answer("<think>So ", "length")
    assert parts(message(engine)) == ("So ", "")


def test_usage_and_logprobs_count_all_tokens() -> None:
    text = "<think>a</think>b"
    [whole] = results(Engine(text), {"logprobs": True})
    entries = whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries[:-1]) == text
    assert whole["usage"]["completion_tokens"] == len(text) + 1
    assert whole["choices"][0]["finish_reason"] == "stop"


# -- when --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "template", "is_on"),
    [
        ("auto", QWEN, True),
        ("auto", "{{ '<think>\\n' }}", True),
        ("auto", "{{ messages }}", False),
        ("auto", None, False),
        ("think", None, True),
        ("think", "{{ messages }}", True),
        ("off", QWEN, False),
    ],
)
def test_the_server_splits_where_its_option_or_the_template_says_so(
    option: str, template: str | None, is_on: bool
) -> None:
    answered = message(Engine("<think>a</think>b", template=template), reasoning_parser=option)
    if is_on:
        assert parts(answered) == ("a", "b")
    else:
        wanted = {"role": "assistant", "content": "<think>a</think>b", "refusal": None}
        assert answered == wanted


def test_another_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reasoning-parser = 'qwen3': choose from auto, think"):
        ServerConfig(reasoning_parser="qwen3")


def test_a_request_may_keep_its_text_whole() -> None:
    answered = message(Engine("<think>a</think>b"), {"separate_reasoning": False})
    assert answered == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}


def test_a_request_may_do_without_the_reasoning() -> None:
    body = {"include_reasoning": False}
    answered = message(Engine("<think>a</think>b"), body)
    assert answered == {"role": "assistant", "content": "b", "refusal": None}
    streamed = deltas(Engine("<think>a</think>b"), body)
    assert streamed == [{"role": "assistant", "content": ""}, {"content": "b"}, {}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"include_reasoning": 0}, "include_reasoning"),
        ({"separate_reasoning": "yes"}, "separate_reasoning"),
        ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(body: Json, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": HELLO, **body})
    error = to_api_error(caught.value)
    assert (error.status, error.param) == (400, param)
    assert param in error.message


def test_a_plain_completion_is_never_split() -> None:
    CompletionRequest.model_validate({"prompt": "Hi", "separate_reasoning": False})
    with pytest.raises(ValidationError, match="separate_reasoning = true is not supported"):
        CompletionRequest.model_validate({"prompt": "Hi", "separate_reasoning": True})


def test_tags_that_the_text_does_not_show_are_not_looked_for() -> None:
    def engine() -> Engine:
        made = Engine("a</think>b", head="<think>")
        made.tokenizer = with_template(QWEN, "<think>", "</think>")
        return made

    assert message(engine())["content"] == "a</think>b"
    assert parts(message(engine(), {"skip_special_tokens": False})) == ("a", "b")


# -- what the prompt ends with -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "text", "wanted"),
    [
        ("<think>", "\na</think>b", ("a", "b")),
        ("<think>\n", "a</think>b", ("a", "b")),
        ("<think>\n\n</think>\n\n", "a", (None, "a")),
        ("<think></think>", "\na</think>b", (None, "\na</think>b")),
        ("answer:", "<think>a</think>b", ("a", "b")),
    ],
)
def test_a_template_may_have_opened_the_thinking(
    head: str, text: str, wanted: tuple[str | None, str]
) -> None:
    assert parts(message(Engine(text, head))) == wanted


def test_a_tag_in_a_users_message_opens_nothing() -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    answered = message(Engine("A tag."), {"messages": messages})
    assert parts(answered) == (None, "A tag.")


@pytest.mark.parametrize(
    ("begun", "text", "wanted"),
    [
        ("<think>\nLet me", " see </think> b", (" see", "b")),
        ("<think>\n" + "Let me " * 40, "see</think>b", ("see", "b")),
        ("<think>\n", "\na</think>b", ("a", "b")),
        ("<think>a</think>", "\n\nb", (None, "b")),
        ("<think>a</think>b", " <think>c", (None, " <think>c")),
        ("So", "<think>a</think>b", (None, "<think>a</think>b")),
    ],
)
def test_a_message_is_continued_from_where_it_was(
    begun: str, text: str, wanted: tuple[str | None, str]
) -> None:
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": begun}],
        "continue_final_message": True,
    }
    assert parts(message(Engine(text), body)) == wanted
    for choice in results(Engine(text), {**body, "n": 3})[0]["choices"]:
        assert parts(choice["message"]) == wanted


def test_a_message_in_parts_is_continued_too() -> None:
    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]}
    )
    assert request.final_text() == "ab"


# -- streams -----------------------------------------------------------------------------------


def test_a_stream_shows_each_part_under_its_name() -> None:
    assert deltas(Engine("<think>\nab\n</think>\n\ncd")) == [
        {"role": "assistant", "content": ""},  # with the first token, of which nothing is shown
        {"reasoning_content": "a"},
        {"reasoning_content": "b"},
        {"content": "c"},
        {"content": "d"},
        {},
    ]


def test_the_first_chunk_may_have_reasoning_already() -> None:
    first, *_ = deltas(Engine("ab</think>c", head="<think>\n"))
    assert first == {"role": "assistant", "content": "", "reasoning_content": "a"}


def test_both_parts_of_one_step_come_in_one_chunk() -> None:
    engine = Engine("")
    steps = [Step("<think>a</think>b", (1, 2, 3)), Step("", (257,), "stop")]
    engine.script = lambda _ids, _choice: list(steps)
    first, last = deltas(engine)
    assert first == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert last == {}


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_what_was_held_back_comes_with_the_finish_reason(finish_reason: str) -> None:
    engine = Engine("")
    engine.script = lambda _ids, _choice: answer("<think>a\n</thi", finish_reason)
    *_, last = results(engine, {"stream": True})
    [choice] = last["choices"]
    assert choice["delta"] == {"reasoning_content": "\n</thi"}
    assert choice["finish_reason"] == finish_reason


def test_logprobs_are_not_held_back() -> None:
    text = "<think>a</think>b"
    chunks = results(Engine(text), {"stream": True, "logprobs": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert len(choices) == len(text) + 1
    assert all(len(choice["logprobs"]["content"]) == 1 for choice in choices)
    assert choices[3]["delta"] == {"content": ""}


tokens = st.sampled_from(["<think>", "</think>", "</", "<th", "ink>", " ", "\n", "a", "é"])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(tokens, max_size=3).map("".join), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(["", "<think>\n", "<think>\n\n</think>"]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    texts: list[str], include_reasoning: bool, head: str
) -> None:
    def engine() -> Engine:
        made = Engine("", head)
        steps = [*(Step(text, (1,)) for text in texts), Step("", (257,), "stop")]
        made.script = lambda _ids, _choice: list(steps)
        return made

    body = {"include_reasoning": include_reasoning}
    whole, streamed = message(engine(), body), deltas(engine(), body)
    assert "".join(delta.get("content", "") for delta in streamed) == whole["content"]
    reasoning = "".join(delta.get("reasoning_content", "") for delta in streamed)
    assert (reasoning or None) == whole.get("reasoning_content")
    assert ("reasoning_content" in whole) == include_reasoning
    first, *rest = streamed
    assert first["role"] == "assistant" and "content" in first
    assert not any("role" in delta for delta in rest)
    assert all(delta for delta in rest[:-1]), "a chunk without anything"
