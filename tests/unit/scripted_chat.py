"""A terminal chat without a model: scripted answers to a scripted user."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from minisgl.params import SamplingParams
from minisgl.shell import Shell

VOCABULARY = 100


class FakeLLM:
    """Answers with scripted pieces, one token each; an exception among them is raised there.

    A piece may also be a callable, called between two chunks. `prompts` records the messages of
    each stream, `open` the streams that were neither finished nor closed.
    """

    max_model_len = 64
    model_info = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))

    def __init__(self, *answers: Sequence[Any], finish: str = "stop") -> None:
        self.answers = list(answers)
        self.finish = finish
        self.encode_error: Exception | None = None
        self.prompts: list[list[tuple[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.open = 0

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if self.encode_error is not None:
            raise self.encode_error
        self.encoded = [(message["role"], message["content"]) for message in messages]
        return list(range(10 * len(messages)))

    def default_params(self) -> SamplingParams:
        return SamplingParams().resolve_defaults({"temperature": 0.6})

    def stream(
        self, prompt: list[int], params: SamplingParams, *, fill_context: bool = False
    ) -> Iterator[Any]:
        assert fill_context
        assert prompt == list(range(10 * len(self.encoded)))
        pieces = self.answers.pop(0)
        if isinstance(pieces, Exception):  # as LLM.stream refuses: at the call
            raise pieces
        self.prompts.append(self.encoded)
        self.params.append(params)
        return self._chunks(pieces)

    def _chunks(self, pieces: Sequence[Any]) -> Iterator[Any]:
        self.open += 1
        try:
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                if callable(piece):
                    piece()
                    continue
                yield SimpleNamespace(text=piece, token_ids=[7], finish_reason=None)
            yield SimpleNamespace(text="", token_ids=[2], finish_reason=self.finish)
        finally:
            self.open -= 1


def talk(
    llm: FakeLLM,
    *lines: str | type[BaseException],
    params: SamplingParams | None = None,
    system: str | None = None,
) -> str:
    """What the shell prints when the user types these lines, then Ctrl-D."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    out = io.StringIO()
    console = Console(file=out, width=60)
    Shell(llm, params or SamplingParams(), system=system, console=console, read=read).run()  # type: ignore[arg-type]
    assert next(script, None) is None, "the shell left before the last line"
    assert llm.open == 0, "a stream was not closed"
    return out.getvalue()
