"""`Backend`: what the chat needs of whoever answers, be it an engine or a server."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

from minisgl.params import SamplingParams

__all__ = ["Backend", "Chunk", "Message"]

Message = dict[str, Any]


class Chunk(NamedTuple):
    """What came next of an answer, and the counts so far."""

    text: str
    output_tokens: int
    prompt_tokens: int | None = None
    """None as long as it is not known."""
    finish_reason: str | None = None
    """Of the whole answer; from the chunk on that ends it."""
    thought: str = ""
    """What the model thinks before it answers, where a server tells it apart."""


class Backend(Protocol):
    """Answers conversations. What it raises are `MinisglError`s; only after an `EngineDeadError`
    is there no use in another attempt."""

    @property
    def context_len(self) -> int | None:
        """Most tokens of a prompt and its answer; None if unknown."""
        ...

    def default_params(self) -> SamplingParams | None:
        """What parameters that are left open stand for; None if unknown."""
        ...

    def check(self, messages: list[Message], params: SamplingParams) -> None:
        """Raise what is known to be wrong with them without generating."""
        ...

    def stream(
        self, messages: list[Message], params: SamplingParams
    ) -> Generator[Chunk, None, None]:
        """Answer a conversation; closing the iterator ends the request at once."""
        ...

    def close(self) -> None:
        """Let go of everything; once, at the end."""
        ...
