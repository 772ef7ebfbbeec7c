"""`Shell`: the conversation, the `/` commands, and what Ctrl-C means."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.text import Text

from minisgl.errors import InvalidRequestError
from minisgl.params import SamplingParams

from .params import PARAM_NAMES, parse_params

if TYPE_CHECKING:
    from prompt_toolkit.completion import WordCompleter

    from minisgl.llm import LLM, StreamChunk

__all__ = ["Shell"]

_COMMANDS = {
    "/reset": ("", "forget the conversation, keep the system message"),
    "/system": ("[TEXT]", "show or set the system message, - for none; setting it resets"),
    "/params": ("[NAME=VALUE ...]", "show or change sampling parameters; none is the default"),
    "/stats": ("", "tokens and speed so far"),
    "/help": ("", "this list"),
    "/exit": ("", "leave, like /quit and Ctrl-D"),
}

# C0 but tab and newline, DEL, C1: what moves cursors, sets titles or begins an escape sequence.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class _Answer:
    """One answer as it grows; `finish_reason` stays None if Ctrl-C ended it."""

    prompt_tokens: int
    text: str = ""
    output_tokens: int = 0
    first_s: float = 0.0
    """Until the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    finish_reason: str | None = None


@dataclass
class _Stop:
    """Whether Ctrl-C was pressed during this answer."""

    asked: bool = False


class Shell:
    """A conversation between the terminal and a model.

    `read` gives the next line and raises EOFError at the end; by default it is prompt_toolkit's
    prompt on a terminal and stdin's lines elsewhere. `params` and `system` are what to begin with.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        console: Console | None = None,
        read: Callable[[], str] | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._console = console if console is not None else _stdout_console()
        self._on_terminal = read is not None or (sys.stdin.isatty() and sys.stdout.isatty())
        if read is None:
            read = _terminal_reader() if self._on_terminal else _stdin_line
        self._read = read
        self._messages: list[dict[str, Any]] = []
        self._context_tokens = 0
        self._answers: list[_Answer] = []
        self._actions = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/params": self._set_params,
            "/stats": self._show_stats,
            "/help": self._show_help,
        }

    def run(self) -> None:
        """Talk until /exit or the end of input.

        Raises `InvalidRequestError` before the first prompt if this model can't chat (no
        tokenizer, no chat template) or can't take the parameters or the system message.
        """
        self._check(self._params, self._system)
        if self._console.is_terminal:
            self._say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", "dim")
        interrupts = 0
        while True:
            try:
                line = self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._on_terminal:  # no line to clear: whoever pressed it means the program
                    raise
                interrupts += 1
                if interrupts == 2:
                    self._say("Type /exit or press Ctrl-D to leave.", "dim")
                continue
            interrupts = 0
            if self._handle(line):
                return

    def _handle(self, line: str) -> bool:
        """Obey a command or answer a message; True when the user wants to leave."""
        if not line.startswith("/"):
            if line.strip():
                self._respond(line)
            return False
        name, *rest = line.split(maxsplit=1)
        name, argument = "/exit" if name == "/quit" else name, "".join(rest).strip()
        if name not in _COMMANDS:
            self._error(
                f"unknown command {name}; commands: {' '.join(_COMMANDS)} (begin a message with a "
                "space to send a leading /)"
            )
        elif argument and not _COMMANDS[name][0]:
            self._error(f"{name} takes no argument, it was given {argument!r}")
        elif name == "/exit":
            return True
        else:
            self._actions[name](argument)
        return False

    # -- commands --------------------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self._messages = []
        self._context_tokens = 0
        self._say("The conversation is forgotten.", "dim")

    def _set_system(self, text: str) -> None:
        if not text:
            self._say(self._system if self._system is not None else "(no system message)")
            return
        system = None if text == "-" else text
        try:
            self._check(self._params, system)
        except InvalidRequestError as error:
            self._error(str(error))
            return
        self._system = system
        self._reset("")

    def _set_params(self, text: str) -> None:
        if not text:
            self._show_params()
            return
        try:
            params = replace(self._params, **parse_params(text))
            self._check(params, self._system)
        except InvalidRequestError as error:
            self._error(str(error))
            return
        self._params = params

    def _show_stats(self, _: str) -> None:
        self._say(f"conversation  {self._context_tokens} of {self._llm.max_model_len} tokens")
        for title, answers in (("last answer", self._answers[-1:]), ("total", self._answers)):
            prompt = sum(answer.prompt_tokens for answer in answers)
            output = sum(answer.output_tokens for answer in answers)
            first_s = sum(answer.first_s for answer in answers)
            self._say(
                f"{title:<13} {prompt} prompt + {output} output tokens, "
                f"prefill {first_s:.2f} s, decode {_rate(answers)}"
            )

    def _show_help(self, _: str) -> None:
        for name, (usage, about) in _COMMANDS.items():
            self._say(f"{name + ' ' + usage:<26}{about}")
        self._say(
            "Ctrl-C stops an answer after the token at work, pressed twice at once. A line that "
            "begins with a space is a message even if a / follows.",
            "dim",
        )

    def _show_params(self) -> None:
        defaults = {**vars(self._llm.default_params()), "max_tokens": "what fits", "seed": "random"}
        for name in PARAM_NAMES:
            value = getattr(self._params, name)
            shown = f"{defaults[name]} (default)" if value is None else value
            self._say(f"{name:<27}{list(value) if isinstance(value, tuple) else shown}")

    # -- answering -------------------------------------------------------------------------

    def _respond(self, text: str) -> None:
        """Answer a message and take both into the conversation, or neither."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._stream(self._llm.encode_chat(_with_system(self._system, messages)))
        except InvalidRequestError as error:
            hint = "; /reset begins anew" if error.param == "prompt" and self._messages else ""
            self._error(f"{error}{hint}")
            return
        if answer.output_tokens:
            self._answers.append(answer)
        if answer.finish_reason is None and not answer.text:
            self._say("[stopped before the answer began; the message is forgotten]", "dim")
            return
        # What the model said goes back to it unchanged, control characters too.
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._context_tokens = answer.prompt_tokens + answer.output_tokens
        if note := self._note(answer):
            self._say(f"[{note}]", "dim")

    def _stream(self, ids: list[int]) -> _Answer:
        """Generate and print; closes the stream whatever happens, which aborts its request."""
        answer = _Answer(len(ids))
        start = time.perf_counter()
        try:
            with _deferred_interrupt() as stop, closing(self._start(ids)) as stream:
                for chunk in stream:
                    elapsed_s = time.perf_counter() - start
                    if answer.output_tokens == 0:
                        answer.first_s = elapsed_s
                    answer.decode_s = elapsed_s - answer.first_s
                    answer.text += chunk.text
                    answer.output_tokens += len(chunk.token_ids)
                    answer.finish_reason = chunk.finish_reason
                    self._write(chunk.text)
                    if stop.asked:
                        break
        except KeyboardInterrupt:  # pressed twice, or the handler was not ours to replace
            pass
        finally:
            if answer.text and not answer.text.endswith("\n"):
                self._write("\n")
        return answer

    def _start(self, ids: list[int]) -> Generator[StreamChunk, None, None]:
        stream = self._llm.stream(ids, self._params, fill_context=True)
        return cast("Generator[StreamChunk, None, None]", stream)  # it can be closed

    def _note(self, answer: _Answer) -> str:
        """What to tell about how an answer ended, if anything."""
        if answer.finish_reason is None:
            return "stopped"
        if answer.finish_reason == "length":
            limit = self._params.max_tokens
            if limit is not None and answer.output_tokens >= limit:
                return f"cut at max_tokens = {limit}"
            return f"the context of {self._llm.max_model_len} tokens is full: /reset begins anew"
        return "" if answer.text else "an empty answer"

    def _check(self, params: SamplingParams, system: str | None) -> None:
        params.check_vocabulary(self._llm.model_info.config.vocab_size)
        self._llm.encode_chat(_with_system(system, [{"role": "user", "content": "Hello"}]))

    # -- output ----------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        # Past rich on purpose: it would wrap lines, expand tabs and read [markup].
        self._console.file.write(_CONTROLS.sub("", text))
        self._console.file.flush()

    def _say(self, line: str, style: str = "") -> None:
        """Print a line of the shell's own; a `Text` has no markup to interpret."""
        self._console.print(Text(_CONTROLS.sub("", line), style), soft_wrap=True)

    def _error(self, message: str) -> None:
        self._say(f"error: {' '.join(message.split())}", "red")


def _with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _rate(answers: list[_Answer]) -> str:
    """Tokens per second while decoding; the first tokens belong to the prefills."""
    tokens = sum(max(answer.output_tokens - 1, 0) for answer in answers)
    seconds = sum(answer.decode_s for answer in answers)
    return f"{tokens / seconds:.1f} tok/s" if tokens and seconds > 0 else "- tok/s"


@contextmanager
def _deferred_interrupt() -> Iterator[_Stop]:
    """Turn the first Ctrl-C into a flag, so that it can't tear a step of the scheduler apart.

    The second one raises at once, for a long prefill. A handler that isn't Python's own stays:
    someone else decided, for instance a parent that has its background jobs ignore Ctrl-C.
    """
    stop = _Stop()

    def press(*_: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    ours = threading.current_thread() is threading.main_thread()  # others may set no handler
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stop
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# -- input and output ----------------------------------------------------------------------


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


def _terminal_reader() -> Callable[[], str]:
    from prompt_toolkit import PromptSession  # only terminals need it

    session: PromptSession[str] = PromptSession(completer=_completer())
    return lambda: session.prompt("> ")


def _completer() -> WordCompleter:
    from prompt_toolkit.completion import WordCompleter

    # `sentence`: the words are compared with the whole line, so only a leading / completes.
    return WordCompleter(list(_COMMANDS), sentence=True)
