"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.core import TokenLogprobs

__all__ = ["CompletionOutput", "RequestOutput", "StreamChunk"]


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    """Generated ids, an EOS that ended the sequence included."""
    finish_reason: str
    """`"stop"` (EOS, stop id or stop string), `"length"` or `"abort"`."""
    stop_reason: int | str | None = None
    """The stop id (other than EOS) or the stop string that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, when `SamplingParams.logprobs` asked for them."""


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt: `n` sequences, the first of which the properties show."""

    prompt: str | None
    """The text given, None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens that the first sequence read from the prefix cache, not computed."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token (the first is None), when asked for."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated ids of the first sequence."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first sequence ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Logprobs of the first sequence."""
        return self.outputs[0].logprobs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class StreamChunk:
    """What a streaming step added; the last chunk has `finish_reason`.

    It is `"stop"`, `"length"` or `"abort"`, or `"error"` when its step failed in another's call.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
