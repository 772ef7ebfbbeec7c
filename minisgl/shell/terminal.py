"""`Terminal`: where lines come from, and what may be printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from minisgl.errors import InvalidRequestError

if TYPE_CHECKING:
    from prompt_toolkit.completion import WordCompleter

__all__ = ["Terminal", "completer", "prompt_reader"]

# C0 but tab and newline, DEL, C1: what moves cursors, sets titles or begins an escape sequence.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Lines in, text out. Control characters in a text are dropped, whoever wrote it.

    `read` gives the next line and raises EOFError at the end; by default it is prompt_toolkit's
    prompt on a terminal, which completes `commands`, and stdin's lines elsewhere.
    """

    def __init__(
        self,
        commands: Sequence[str],
        console: Console | None = None,
        read: Callable[[], str] | None = None,
    ) -> None:
        self._console = console if console is not None else _stdout_console()
        self.interactive = read is not None or (sys.stdin.isatty() and sys.stdout.isatty())
        """Whether a person sits in front of it, line by line."""
        if read is None:
            read = prompt_reader(commands) if self.interactive else _stdin_line
        self.read = read
        self._aside = False  # the kind of the piece that was written last
        self._in_line = False  # whether it left its line open

    @property
    def shows_output(self) -> bool:
        """Whether what is printed goes to a terminal."""
        return self._console.is_terminal

    def write(self, text: str, *, aside: bool = False) -> None:
        """Print a piece of an answer as it stands and at once; what is an aside is dim, on lines
        of its own."""
        text = _CONTROLS.sub("", text)
        if not text:
            return
        if aside != self._aside:
            self.end_line()
        if aside:
            self._console.print(Text(text, "dim"), end="", soft_wrap=True)
        else:  # past rich on purpose: it would wrap lines, expand tabs and read [markup]
            self._console.file.write(text)
        self._console.file.flush()
        self._aside, self._in_line = aside, not text.endswith("\n")

    def end_line(self) -> None:
        """Let what is printed next begin a line."""
        if self._in_line:
            self._in_line = False
            self._console.file.write("\n")
            self._console.file.flush()

    def say(self, line: str, style: str = "") -> None:
        """Print a line of the chat's own; a `Text` has no markup to interpret."""
        self._console.print(Text(_CONTROLS.sub("", line), style), soft_wrap=True)

    def error(self, message: str) -> None:
        """Print what went wrong, in one line."""
        self.say(f"error: {' '.join(message.split())}", "red")


def _stdout_console() -> Console:
    # An answer may hold what the terminal's encoding lacks: that must not end the chat.
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return Console(highlight=False)


def _stdin_line() -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"stdin is not UTF-8 text: {error}") from error
    if not line:
        raise EOFError
    return line.rstrip("\n")


def prompt_reader(commands: Sequence[str]) -> Callable[[], str]:
    """prompt_toolkit's prompt: history, pastes of several lines, completion."""
    from prompt_toolkit import PromptSession  # only terminals need it

    session: PromptSession[str] = PromptSession(completer=completer(commands))
    return lambda: session.prompt("> ")


def completer(commands: Sequence[str]) -> WordCompleter:
    """Completes a line that begins with a command's first letters."""
    from prompt_toolkit.completion import WordCompleter

    # `sentence`: the words are compared with the whole line, so only a leading / completes.
    return WordCompleter(list(commands), sentence=True)
