"""`Answer`: one answer as it grows, and what is told of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .backend import Chunk

__all__ = ["Answer", "summary"]


@dataclass
class Answer:
    """One answer as it grows; `finish_reason` stays None if Ctrl-C ended it."""

    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    first_s: float = 0.0
    """From the message to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    finish_reason: str | None = None
    _start_s: float = field(default_factory=time.perf_counter)

    def add(self, chunk: Chunk) -> None:
        """Take what came next, now."""
        elapsed_s = time.perf_counter() - self._start_s
        if self.output_tokens == 0:
            self.first_s = elapsed_s
        self.decode_s = elapsed_s - self.first_s
        self.text += chunk.text
        self.output_tokens = chunk.output_tokens
        self.prompt_tokens = chunk.prompt_tokens
        self.finish_reason = chunk.finish_reason

    @property
    def context_tokens(self) -> int | None:
        """Tokens of the conversation up to its end, None if unknown."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.output_tokens

    def ending(self, max_tokens: int | None, context_len: int | None) -> str:
        """What to tell about how it ended, if anything; the arguments are what limited it."""
        if self.finish_reason in (None, "abort"):
            return "stopped"
        if self.finish_reason == "length":
            if max_tokens is not None and self.output_tokens >= max_tokens:
                return f"cut at max_tokens = {max_tokens}"
            if context_len is not None and (self.context_tokens or 0) >= context_len:
                return f"the context of {context_len} tokens is full: /reset begins anew"
            return (
                "cut by a default limit (/params max_tokens=N sets it) or a full context (/reset "
                "begins anew)"
            )
        if self.finish_reason != "stop":
            return f"ended by {self.finish_reason}"
        return "" if self.text else "an empty answer"


def summary(answers: Sequence[Answer]) -> str:
    """Their tokens and speed, in half a line."""
    prompts = [answer.prompt_tokens for answer in answers]
    known = sum(tokens for tokens in prompts if tokens is not None)
    prompt = f"{known or ''} + unknown".removeprefix(" + ") if None in prompts else f"{known}"
    output = sum(answer.output_tokens for answer in answers)
    first_s = sum(answer.first_s for answer in answers)
    return (
        f"{prompt} prompt + {output} output tokens, "
        f"prefill {first_s:.2f} s, decode {_rate(answers)}"
    )


def _rate(answers: Sequence[Answer]) -> str:
    """Tokens per second while decoding; the first tokens belong to the prefills."""
    tokens = sum(max(answer.output_tokens - 1, 0) for answer in answers)
    seconds = sum(answer.decode_s for answer in answers)
    return f"{tokens / seconds:.1f} tok/s" if tokens and seconds > 0 else "- tok/s"
