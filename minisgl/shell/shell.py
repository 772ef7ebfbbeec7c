"""`Shell`: the conversation, the `/` commands, and what Ctrl-C means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from rich.console import Console

from minisgl.errors import EngineDeadError, InvalidRequestError, MinisglError
from minisgl.params import SamplingParams

from .answer import Answer, summary
from .backend import Backend, Message
from .params import PARAM_NAMES, parse_params
from .terminal import Terminal

__all__ = ["COMMANDS", "Shell"]

COMMANDS = {
    "/reset": ("", "forget the conversation, keep the system message"),
    "/system": ("[TEXT]", "show or set the system message, - for none; setting it resets"),
    "/params": ("[NAME=VALUE ...]", "show or change sampling parameters; none is the default"),
    "/stats": ("", "tokens and speed so far"),
    "/help": ("", "this list"),
    "/exit": ("", "leave, like /quit and Ctrl-D"),
}


class Shell:
    """A conversation between the terminal and a model.

    `params` and `system` are what to begin with; `console` and `read` are those of `Terminal`.
    The backend stays its owner's to close.
    """

    def __init__(
        self,
        backend: Backend,
        params: SamplingParams,
        *,
        system: str | None = None,
        console: Console | None = None,
        read: Callable[[], str] | None = None,
    ) -> None:
        self._backend = backend
        self._params = params
        self._system = system
        self._terminal = Terminal(list(COMMANDS), console, read)
        self._messages: list[Message] = []
        self._context_tokens: int | None = 0
        self._answers: list[Answer] = []
        self._actions = {
            "/reset": self._reset,
            "/system": self._set_system,
            "/params": self._set_params,
            "/stats": self._show_stats,
            "/help": self._show_help,
        }

    def run(self) -> None:
        """Talk until /exit or the end of input.

        Raises `InvalidRequestError` before the first prompt if it is known that this model can't
        chat (no tokenizer, no chat template) or can't take the parameters or the system message,
        and `EngineDeadError` whenever the engine died.
        """
        self._check(self._params, self._system)
        if self._terminal.shows_output:
            self._aside("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        interrupts = 0
        while True:
            try:
                if self._handle(self._terminal.read()):
                    return
                interrupts = 0
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._terminal.interactive:  # whoever pressed it means the program
                    raise
                interrupts += 1
                if interrupts == 2:
                    self._aside("Type /exit or press Ctrl-D to leave.")

    def _handle(self, line: str) -> bool:
        """Obey a command or answer a message; True when the user wants to leave."""
        if not line.startswith("/"):
            if line.strip():
                with self._reporting():
                    self._respond(line)
            return False
        name, *rest = line.split(maxsplit=1)
        name, argument = "/exit" if name == "/quit" else name, "".join(rest).strip()
        if name not in COMMANDS:
            self._terminal.error(
                f"unknown command {name}; commands: {' '.join(COMMANDS)} (begin a message with a "
                "space to send a leading /)"
            )
        elif argument and not COMMANDS[name][0]:
            self._terminal.error(f"{name} takes no argument, it was given {argument!r}")
        elif name == "/exit":
            return True
        else:
            with self._reporting():
                self._actions[name](argument)
        return False

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Print an error that only ends what was tried inside the block."""
        try:
            yield
        except EngineDeadError:
            raise
        except MinisglError as error:
            about_prompt = isinstance(error, InvalidRequestError) and error.param == "prompt"
            hint = "; /reset begins anew" if about_prompt and self._messages else ""
            self._terminal.error(f"{error}{hint}")

    # -- commands --------------------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self._messages = []
        self._context_tokens = 0
        self._aside("The conversation is forgotten.")

    def _set_system(self, text: str) -> None:
        if not text:
            shown = self._system if self._system is not None else "(no system message)"
            self._terminal.say(shown)
            return
        system = None if text == "-" else text
        self._check(self._params, system)
        self._system = system
        self._reset("")

    def _set_params(self, text: str) -> None:
        if not text:
            self._show_params()
            return
        params = replace(self._params, **parse_params(text))
        self._check(params, self._system)
        self._params = params

    def _show_stats(self, _: str) -> None:
        used = "unknown" if self._context_tokens is None else self._context_tokens
        length = self._backend.context_len
        limit = "" if length is None else f" of {length}"
        self._terminal.say(f"conversation  {used}{limit} tokens")
        self._terminal.say(f"last answer   {summary(self._answers[-1:])}")
        self._terminal.say(f"total         {summary(self._answers)}")

    def _show_help(self, _: str) -> None:
        for name, (usage, about) in COMMANDS.items():
            self._terminal.say(f"{name + ' ' + usage:<26}{about}")
        self._aside(
            "Ctrl-C stops an answer. A line that begins with a space is a message even if a / "
            "follows."
        )

    def _show_params(self) -> None:
        known = self._backend.default_params()
        defaults = {} if known is None else {**vars(known), "max_tokens": "what fits"}
        defaults["seed"] = "random"
        for name in PARAM_NAMES:
            value = getattr(self._params, name)
            shown = f"{defaults.get(name, 'of the server')} (default)" if value is None else value
            self._terminal.say(f"{name:<27}{list(value) if isinstance(value, tuple) else shown}")

    # -- answering -------------------------------------------------------------------------

    def _respond(self, text: str) -> None:
        """Answer a message and take both into the conversation, or neither."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = self._stream(_with_system(self._system, messages))
        if answer.output_tokens:
            self._answers.append(answer)
        if answer.finish_reason is None and not answer.text:
            self._aside("[stopped before the answer began; the message is forgotten]")
            return
        # What the model said goes back to it unchanged, control characters too.
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._context_tokens = answer.context_tokens
        if note := answer.ending(self._params.max_tokens, self._backend.context_len):
            self._aside(f"[{note}]")

    def _stream(self, messages: list[Message]) -> Answer:
        """Generate and print. Ctrl-C ends the answer: closing the stream ends the request."""
        answer = Answer()
        try:
            with closing(self._backend.stream(messages, self._params)) as stream:
                for chunk in stream:
                    answer.add(chunk)
                    self._terminal.write(chunk.thought, aside=True)
                    self._terminal.write(chunk.text)
        except KeyboardInterrupt:
            pass
        finally:
            self._terminal.end_line()
        return answer

    def _check(self, params: SamplingParams, system: str | None) -> None:
        example = [{"role": "user", "content": "Hello"}]
        self._backend.check(_with_system(system, example), params)

    def _aside(self, line: str) -> None:
        self._terminal.say(line, "dim")


def _with_system(system: str | None, messages: list[Message]) -> list[Message]:
    return messages if system is None else [{"role": "system", "content": system}, *messages]
