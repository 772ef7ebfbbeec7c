"""The shapes of the OpenAI endpoints' answers, and of each choice in them.

The `TypedDict`s say what goes over the wire; the schema of `/openapi.json` is made from them.
A sequence's text arrives in pieces, and a `ChatChoice` or `TextChoice` turns each into the
choice of a chunk; the whole answer is the choice of one piece that has everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from typing_extensions import NotRequired, TypedDict

from minisgl.core import TokenLogprobs
from minisgl.message import SequenceDelta

from .generation import Generation
from .logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TextLogprobs,
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Choice",
    "Completion",
    "Piece",
    "TextChoice",
    "TextOptions",
    "Usage",
    "count_usage",
]


# -- what is sent ----------------------------------------------------------------------------

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
    refusal: None


class ChatDelta(TypedDict):
    """What a chunk adds to an answer; the role comes with the first token."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


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


# -- how choices are made --------------------------------------------------------------------


@dataclass
class Piece:
    """What deltas of one sequence add up to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Append what came next."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def is_due(self, started: bool) -> bool:
        """Whether it makes a chunk: text or logprobs do, the end does, and the first token."""
        if self.finish_reason is not None or self.text or self.logprobs:
            return True
        return not started and bool(self.token_ids)


class Choice(Protocol):
    """One sequence on its way to the client: use either `whole` or `delta`."""

    def whole(self, piece: Piece) -> ChatAnswerChoice | CompletionChoice:
        """The choice of an answer that is not streamed."""
        ...

    def delta(self, piece: Piece) -> ChatDeltaChoice | CompletionChoice | None:
        """The choice of the next chunk; None while there is none: ask again when `piece` grew.

        The first chunk comes with the first token, even if its text is held back.
        """
        ...


class ChatChoice:
    """An answer of a chat; `texts` are given if logprobs are wanted."""

    def __init__(self, index: int, texts: TokenTexts | None) -> None:
        self._index = index
        self._texts = texts
        self._started = False

    def whole(self, piece: Piece) -> ChatAnswerChoice:
        """See `Choice`."""
        return {
            "index": self._index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def delta(self, piece: Piece) -> ChatDeltaChoice | None:
        """See `Choice`."""
        if not piece.is_due(self._started):
            return None
        delta: ChatDelta = {} if self._started else {"role": "assistant", "content": ""}
        if piece.text or piece.finish_reason is None:
            delta["content"] = piece.text
        self._started = True
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return None if self._texts is None else chat_logprobs(piece.logprobs, self._texts)


@dataclass(frozen=True)
class TextOptions:
    """What the choices of a completion are to have besides the text."""

    texts: TokenTexts
    logprobs: int | None = None
    """How many of the most likely tokens; None for no logprobs."""
    prompt_logprobs: int | None = None


class TextChoice:
    """A continuation of a prompt; `echo` is the prompt's text if it comes first."""

    def __init__(
        self, index: int, generation: Generation, echo: str | None, options: TextOptions
    ) -> None:
        self._index = index
        self._generation = generation
        self._echo = echo
        self._options = options
        self._started = False
        self._offsets = TextOffsets(
            options.texts,
            begin=len(echo or ""),
            skip_special_tokens=generation.params.skip_special_tokens,
        )

    def whole(self, piece: Piece) -> CompletionChoice:
        """See `Choice`."""
        choice = self._next(piece)
        top, scored = self._options.prompt_logprobs, self._generation.prompt_logprobs
        if top is not None and scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scored, self._options.texts, top=top)
        return choice

    def delta(self, piece: Piece) -> CompletionChoice | None:
        """See `Choice`."""
        if not piece.is_due(self._started) or self._awaits_prompt():
            return None
        return self._next(piece)

    def _awaits_prompt(self) -> bool:
        """Whether the prompt's logprobs are to be shown and not here yet.

        They come with the first sequence of the prompt; this one may be ahead of it.
        """
        generation = self._generation
        if self._started or self._echo is None or self._options.logprobs is None:
            return False
        known = generation.prompt_logprobs or ()
        return len(known) < len(generation.prompt_token_ids) and not generation.finished

    def _next(self, piece: Piece) -> CompletionChoice:
        echo = self._echo if not self._started else None
        self._started = True
        return {
            "index": self._index,
            "text": piece.text if echo is None else echo + piece.text,
            "logprobs": self._logprobs(piece, echo),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, piece: Piece, echo: str | None) -> TextLogprobs | None:
        top, texts = self._options.logprobs, self._options.texts
        if top is None:
            return None
        token_ids, places = piece.token_ids, self._offsets.place(piece.token_ids)
        entries: list[TokenLogprobs | None] = [*piece.logprobs]
        if echo is not None:
            prompt = self._generation.prompt_token_ids
            scored = self._generation.prompt_logprobs or []
            unknown = [None] * (len(prompt) - len(scored))  # aborted before it was computed
            entries = [*scored, *unknown, *entries]
            token_ids = prompt + token_ids
            places = TextOffsets(texts, text=echo).place(prompt) + places
        return text_logprobs(token_ids, entries, places, texts, top=top)
