"""One sequence on its way from tokens to text."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from minisgl.core import Req, SamplingParams, TokenLogprobs
from minisgl.tokenizer import StopStringChecker, Tokenizer

from .outputs import CompletionOutput

__all__ = ["Piece", "Sequence"]


class _Update(Protocol):
    """What a step changed: the scheduler's `Update`, or a `TokenUpdate` from its process."""

    @property
    def token_id(self) -> int | None: ...
    @property
    def logprobs(self) -> TokenLogprobs | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class Piece(NamedTuple):
    """What came since the last one."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class Sequence:
    """Collects a request's updates; detokenizes, finds stop strings, keeps what streams.

    After `push` returns True the front must end the request: its text hit a stop string.
    """

    def __init__(
        self, uid: int, params: SamplingParams, tokenizer: Tokenizer | None, index: int = 0
    ) -> None:
        self.uid = uid
        self.params = params
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._text: list[str] = []
        self._taken = (0, 0, 0, 0)  # pieces of text, tokens, logprobs, prompt logprobs
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopStringChecker(
            tuple(params.stop), include_stop=params.include_stop_str_in_output
        )

    @classmethod
    def of(cls, req: Req, tokenizer: Tokenizer | None) -> Sequence:
        """The sequence of a request."""
        return cls(req.uid, req.params, tokenizer, req.choice)

    def push(self, update: _Update) -> bool:
        """Take an update of this request; True when its text just hit a stop string."""
        self.prompt_logprobs += update.prompt_logprobs or ()
        matched = False
        if update.token_id is not None and self._stop_reason is None:
            matched = self._push_token(update.token_id, update.logprobs, update.finish_reason)
        if update.finish_reason is not None:
            if not isinstance(self._stop_reason, str):
                self._flush()  # may find a stop string in what was held back
            self.finish_reason = "stop" if self._stop_reason is not None else update.finish_reason
        return matched and update.finish_reason is None

    def take(self) -> Piece | None:
        """What came since the last call, None if nothing did."""
        texts, tokens, entries, scored = self._taken
        self._taken = (
            len(self._text),
            len(self.token_ids),
            len(self.logprobs),
            len(self.prompt_logprobs),
        )
        if self._taken == (texts, tokens, entries, scored) and self.finish_reason is None:
            return None
        return Piece(
            "".join(self._text[texts:]),
            self.token_ids[tokens:],
            self.logprobs[entries:],
            self.prompt_logprobs[scored:],
            self.finish_reason,
            self._stop_reason,
        )

    def output(self) -> CompletionOutput:
        """The finished sequence."""
        return CompletionOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self._stop_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
        )

    def _push_token(
        self, token: int, logprobs: TokenLogprobs | None, finish_reason: str | None
    ) -> bool:
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if finish_reason == "stop":  # the id itself ended it: no part of the text
            if token in self.params.stop_token_ids:
                self._stop_reason = token
            return False
        if self._detokenizer is None:
            return False
        delta = self._detokenizer.push(token)
        if len(self.token_ids) < self.params.min_tokens:
            self._text.append(delta)  # too early for any stop
            return False
        return self._push_text(delta)

    def _push_text(self, delta: str) -> bool:
        result = self._stops.push(delta)
        self._text.append(result.text)
        if result.matched is None:
            return False
        self._stop_reason = result.matched
        return True

    def _flush(self) -> None:
        if self._detokenizer is not None and not self._push_text(self._detokenizer.flush()):
            self._text.append(self._stops.flush())
