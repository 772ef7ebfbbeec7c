"""The shapes of the OpenAI endpoints' answers: what goes over the wire.

The schema of `/openapi.json` is made from them; `choices.py` makes the choices in them.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict

from .logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs

__all__ = [
    "ChatAnswer",
    "ChatAnswerChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatDelta",
    "ChatDeltaChoice",
    "Completion",
    "CompletionChoice",
    "Usage",
    "count_usage",
]

FinishReason = str | None
"""`"stop"`, `"length"` or `"abort"`; None in a chunk after which the choice goes on."""


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Read from the prefix cache, not computed."""


class Usage(TypedDict):
    """What a request took. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    """All that were generated, one that ended a choice included."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatAnswer(TypedDict):
    """An answer."""

    role: Literal["assistant"]
    content: str
    """Empty if the answer ended before the model had done thinking."""
    reasoning_content: NotRequired[str | None]
    """What the model thought before; only where the server's `--reasoning-parser` is on."""
    refusal: None


class ChatDelta(TypedDict):
    """What a chunk adds to an answer; the role comes with the first token."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatAnswerChoice(TypedDict):
    """One answer of a chat completion."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or stop token id that ended it."""


class ChatDeltaChoice(TypedDict):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletion(TypedDict):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatAnswerChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletionChunk(TypedDict):
    """A piece of it, when streamed."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatDeltaChoice]
    """One; none only in the last chunk, which has the usage."""
    usage: NotRequired[Usage | None]


class CompletionChoice(TypedDict):
    """One continuation of a prompt, or what a chunk adds to it."""

    index: int
    """`n * prompt + i` for the i-th of the `n` continuations of a prompt."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(TypedDict):
    """The answer of `/v1/completions`, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


def count_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The counts of a request so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
