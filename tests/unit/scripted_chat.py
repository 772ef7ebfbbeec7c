"""A terminal chat without a model: scripted answers to a scripted user."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from minisgl.params import SamplingParams
from minisgl.shell import Backend, Chunk, Shell

VOCABULARY = 100


class FakeBackend:
    """Answers with scripted pieces, one token each; an exception among them is raised there.

    A piece may also be a callable, called between two chunks. `prompts` records the messages of
    each stream, `open` the streams that were neither finished nor closed. A message has ten
    tokens.
    """

    context_len: int | None = 64
    knows_prompts = True
    knows_defaults = True

    def __init__(self, *answers: Sequence[Any] | Exception, finish: str = "stop") -> None:
        self.answers = list(answers)
        self.finish = finish
        self.prompts: list[list[tuple[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.open = 0

    def default_params(self) -> SamplingParams | None:
        if not self.knows_defaults:
            return None
        return SamplingParams().resolve_defaults({"temperature": 0.6})

    def check(self, messages: list[dict[str, Any]], params: SamplingParams) -> None:
        params.check_vocabulary(VOCABULARY)

    def stream(
        self, messages: list[dict[str, Any]], params: SamplingParams
    ) -> Generator[Chunk, None, None]:
        self.open += 1
        prompt_tokens = 10 * len(messages) if self.knows_prompts else None
        count = 0
        try:
            pieces = self.answers.pop(0)
            if isinstance(pieces, Exception):
                raise pieces
            self.prompts.append([(message["role"], message["content"]) for message in messages])
            self.params.append(params)
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                if callable(piece):
                    piece()
                    continue
                count += 1
                chunk = Chunk("", count, prompt_tokens)
                yield chunk._replace(**piece if isinstance(piece, dict) else {"text": piece})
            yield Chunk("", count + 1, prompt_tokens, self.finish)
        finally:
            self.open -= 1

    def close(self) -> None:
        raise AssertionError("the shell does not own its backend")


def talk(
    backend: Backend,
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
    Shell(backend, params or SamplingParams(), system=system, console=console, read=read).run()
    assert next(script, None) is None, "the shell left before the last line"
    assert getattr(backend, "open", 0) == 0, "a stream was not closed"
    return out.getvalue()


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """For `press_ctrl_c`: tests that run in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    """In the main thread, as the terminal does; from any thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)
