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
from .large import apart, num_entries
from .logprobs import (
    ChatLogprobs,
    PromptLogprobs,
    TextColumns,
    TextLogprobs,
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from .responses import (
    ChatAnswer,
    ChatAnswerChoice,
    ChatDelta,
    ChatDeltaChoice,
    CompletionChoice,
)

__all__ = ["ChatChoice", "ChatOptions", "Choice", "Piece", "Prompt", "TextChoice", "TextOptions"]


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
    """Of the prompt; None for none."""


class Prompt:
    """What all choices of a prompt begin with; `echo` is its text if it comes first.

    Its logprobs are written once, by `prepare`, however many choices show them.
    """

    def __init__(self, generation: Generation, options: TextOptions, echo: str | None) -> None:
        self.generation = generation
        self.echo = echo
        self.options = options
        self.logprobs: PromptLogprobs | None = None
        """If asked for and prepared."""
        self.echoed: TextColumns | None = None
        """Those before a choice's own, likewise."""
        echoes = echo is not None and options.logprobs is not None
        self.is_prepared = options.prompt_logprobs is None and not echoes
        """Whether choices may begin: the prompt's logprobs are written, or none are shown."""

    async def prepare(self) -> None:
        """Write the prompt's logprobs, if that is due.

        They come with the first sequence of the prompt; another one may be ahead of it.
        """
        generation = self.generation
        prompt_len = len(generation.prompt_token_ids)
        if self.is_prepared or not (generation.num_scored == prompt_len or generation.finished):
            return
        await apart(num_entries(prompt_len, generation.params, 0), self._write)
        self.is_prepared = True

    def _write(self) -> None:
        scored = self.generation.prompt_logprobs or []
        texts, top = self.options.texts, self.options.prompt_logprobs
        if top is not None:
            self.logprobs = prompt_logprobs(scored, texts, top=top)
        if self.echo is not None and self.options.logprobs is not None:
            ids = self.generation.prompt_token_ids
            unknown = [None] * (len(ids) - len(scored))  # aborted before it was computed
            columns = TextColumns(texts, self.options.logprobs)
            columns.add(ids, [*scored, *unknown], TextOffsets(texts, text=self.echo).place(ids))
            self.echoed = columns


class TextChoice:
    """A continuation of a prompt, which must be prepared."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self._index = index
        self._prompt = prompt
        self._started = False
        self._offsets = TextOffsets(
            prompt.options.texts,
            begin=len(prompt.echo or ""),
            skip_special_tokens=prompt.generation.params.skip_special_tokens,
        )

    def whole(self, piece: Piece) -> CompletionChoice:
        """See `Choice`."""
        choice = self._next(piece)
        if self._prompt.logprobs is not None:
            choice["prompt_logprobs"] = self._prompt.logprobs
        return choice

    def delta(self, piece: Piece) -> CompletionChoice | None:
        """See `Choice`."""
        if not self._prompt.is_prepared or not piece.is_due(self._started):
            return None
        return self._next(piece)

    def _next(self, piece: Piece) -> CompletionChoice:
        first, self._started = not self._started, True
        text = piece.take_text()
        if first and self._prompt.echo is not None:
            text = self._prompt.echo + text
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(piece, self._prompt.echoed if first else None),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, piece: Piece, echoed: TextColumns | None) -> TextLogprobs | None:
        options = self._prompt.options
        if options.logprobs is None:
            return None
        columns = TextColumns(options.texts, options.logprobs) if echoed is None else echoed.copy()
        columns.add(piece.token_ids, piece.logprobs, self._offsets.place(piece.token_ids))
        return columns.shape()
