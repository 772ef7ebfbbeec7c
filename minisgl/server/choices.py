"""How the choices of an answer are made.

A sequence's text arrives in pieces, and a `ChatChoice` or `TextChoice` turns each into the
choice of a chunk; the whole answer is the choice of one piece that has everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from minisgl.core import TokenLogprobs
from minisgl.message import SequenceDelta
from minisgl.tokenizer import ReasoningSplitter, SplitText

from .generation import Generation
from .logprobs import (
    ChatLogprobs,
    TextLogprobs,
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from .responses import (
    ChatAnswer,
    ChatAnswerChoice,
    ChatDelta,
    ChatDeltaChoice,
    CompletionChoice,
)

__all__ = ["ChatChoice", "ChatOptions", "Choice", "Piece", "TextChoice", "TextOptions"]


@dataclass
class Piece:
    """What deltas of one sequence add up to."""

    texts: list[str] = field(default_factory=list)
    """In order; a list, for a piece may have to wait for long."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Append what came next."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def take_text(self) -> str:
        """The text so far, which the piece then no longer has."""
        text = "".join(self.texts)
        self.texts = []
        return text

    def is_due(self, started: bool) -> bool:
        """Whether it makes a chunk: text or logprobs do, the end does, and the first token."""
        if self.finish_reason is not None or self.texts or self.logprobs:
            return True
        return not started and bool(self.token_ids)


class Choice(Protocol):
    """One sequence on its way to the client: use either `whole` or `delta`."""

    def whole(self, piece: Piece) -> ChatAnswerChoice | CompletionChoice:
        """The choice of an answer that is not streamed."""
        ...

    def delta(self, piece: Piece) -> ChatDeltaChoice | CompletionChoice | None:
        """The choice of the next chunk; None while there is none: ask again when `piece` grew.

        It may take the piece's text all the same. The first chunk comes with the first token,
        even if its text is held back.
        """
        ...


@dataclass(frozen=True)
class ChatOptions:
    """What the choices of a chat are to have besides the content."""

    texts: TokenTexts | None = None
    """Given if logprobs are wanted."""
    reasoning: bool = True
    """Whether reasoning is shown where it is split off."""


class ChatChoice:
    """An answer of a chat; `splitter` is given if its reasoning is to be split off."""

    def __init__(
        self, index: int, options: ChatOptions, splitter: ReasoningSplitter | None = None
    ) -> None:
        self._index = index
        self._options = options
        self._splitter = splitter
        self._started = False

    def whole(self, piece: Piece) -> ChatAnswerChoice:
        """See `Choice`."""
        reasoning, content = self._split(piece)
        message: ChatAnswer = {"role": "assistant", "content": content, "refusal": None}
        if self._splitter is not None and self._options.reasoning:
            message["reasoning_content"] = reasoning or None
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def delta(self, piece: Piece) -> ChatDeltaChoice | None:
        """See `Choice`."""
        reasoning, content = self._split(piece)
        if not (reasoning or content or piece.is_due(self._started)):
            return None
        delta: ChatDelta = {} if self._started else {"role": "assistant", "content": ""}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content or not (reasoning or piece.finish_reason):
            delta["content"] = content
        self._started = True
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _split(self, piece: Piece) -> SplitText:
        """Take the text out of `piece`; what of it goes to the client now."""
        text = piece.take_text()
        if self._splitter is None:
            return SplitText("", text)
        reasoning, content = self._splitter.push(text)
        if piece.finish_reason is not None:
            held = self._splitter.flush()
            reasoning, content = reasoning + held.reasoning, content + held.content
        return SplitText(reasoning if self._options.reasoning else "", content)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        texts = self._options.texts
        return None if texts is None else chat_logprobs(piece.logprobs, texts)


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
        text = piece.take_text()
        self._started = True
        return {
            "index": self._index,
            "text": text if echo is None else echo + text,
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
