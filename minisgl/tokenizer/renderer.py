"""A pool of processes that render chat templates, so that one that does not end can be ended.

    threads ---> TemplateRenderer ---> render_worker    busy: one render at a time
                   free children  ---> render_worker    waits for its next one

Invariant: a child is in the queue of free ones or held by exactly one thread, which alone talks
to it, replaces its process and puts it back. Only `kill` is for everyone.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import BusyError, ChatTemplateError, MinisglError, RequestFailedError
from ..utils.logger import get_logger
from .chat_template import ChatTemplate
from .render_worker import (
    EXIT_TOO_MUCH_MEMORY,
    EXIT_TOO_MUCH_TIME,
    Refused,
    Render,
    Rendered,
    pack_text,
    receive_frame,
    send_frame,
    unpack_text,
)

__all__ = ["TemplateRenderer"]

_WORKER = "minisgl.tokenizer.render_worker"
_IMPORT_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds this `minisgl`
_logger = get_logger(__name__)


class TemplateRenderer:
    """Renders chat templates in `processes` child processes; safe to share between threads.

    A render may use `cpu_limit_s` seconds of CPU time, and its process `memory_limit_bytes` of
    address space; beyond that it is a ChatTemplateError, and a fresh process takes the place of
    the one that was ended.
    """

    def __init__(
        self,
        *,
        processes: int = 2,
        cpu_limit_s: float = 2.0,
        memory_limit_bytes: int = 1 << 30,
    ) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._memory_limit_bytes = memory_limit_bytes
        # For a process that makes no progress at all: one that computes reaches its CPU limit
        # long before, even where others take most of the machine.
        self._wall_limit_s = 4 * cpu_limit_s + 5
        self._closed = False
        self._closing = threading.Lock()
        self._children = [_Child(cpu_limit_s, memory_limit_bytes) for _ in range(processes)]
        self._free: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            child.start()
            self._free.put(child)

    def render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> str:
        """What `template.render(messages, **options)` gives or raises; blocks.

        Also raises ChatTemplateError if the template reaches a limit, RequestFailedError if its
        process died by itself, and BusyError after `close`.
        """
        return template.render(messages, run=self._run, **options)

    def close(self) -> None:
        """End the processes; renders that still run fail. May be called again."""
        with self._closing:
            self._closed = True
            for child in self._children:
                child.kill()  # the thread that waits for it puts it back
            for _ in self._children:
                self._free.get().stop()
            for child in self._children:
                self._free.put(child)  # for threads that wait for one; they will see `_closed`

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        try:
            data = json.dumps(variables).encode("ascii")
        except ValueError as error:  # an integer of more digits than Python writes
            raise ChatTemplateError(
                f"The messages can't be handed to the chat template: {error}", "messages"
            ) from error
        frame = msgspec.msgpack.encode(Render(pack_text(source), data))
        child = self._free.get()
        try:
            reply = self._exchange(child, frame)
        finally:
            self._free.put(child)
        if isinstance(reply, Refused):
            raise ChatTemplateError(unpack_text(reply.message), reply.param)
        return unpack_text(reply.text)

    def _exchange(self, child: _Child, frame: bytes) -> Rendered | Refused:
        if self._closed:
            raise self._closed_error()
        try:
            child.start()  # it may have died since its last render
        except OSError as error:
            raise RequestFailedError(
                f"No process can be started to render the chat template: {error}"
            ) from error
        try:
            return child.exchange(frame, self._wall_limit_s)
        except (OSError, EOFError) as error:
            failure = self._failure(child.exit_status, isinstance(error, TimeoutError))
            _logger.warning("%s", failure)
            raise failure from None
        finally:
            if not self._closed:
                with contextlib.suppress(OSError):  # the next render tries again, and says so
                    child.start()  # unless it still runs; it loads while others go on

    def _failure(self, exit_status: int | None, is_late: bool) -> MinisglError:
        """Why there was no reply."""
        if self._closed:
            return self._closed_error()
        if exit_status == EXIT_TOO_MUCH_MEMORY:
            reason = f"used more than {self._memory_limit_bytes >> 20} MiB of memory"
        elif exit_status == EXIT_TOO_MUCH_TIME:
            reason = f"ran for more than {self._cpu_limit_s:g} s"
        elif is_late:
            reason = f"did not end within {self._wall_limit_s:g} s"
        else:
            return RequestFailedError(
                f"The process that rendered the chat template died ({_ending(exit_status)}); "
                "there is another one now, try again"
            )
        return ChatTemplateError(
            f"The chat template {reason} on these messages and was stopped; send less, or other "
            "chat_template_kwargs",
            "messages",
        )

    @staticmethod
    def _closed_error() -> BusyError:
        return BusyError("Chat templates are no longer rendered: the server is shutting down")


class _Child:
    """One worker process at a time, and the socket to it."""

    def __init__(self, cpu_limit_s: float, memory_limit_bytes: int) -> None:
        limits = [str(cpu_limit_s), str(memory_limit_bytes)]
        self._command = [sys.executable, "-m", _WORKER, *limits]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def exit_status(self) -> int | None:
        """As `subprocess` has it; None while the process runs."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start a process unless one runs, without waiting for it; OSError if that fails."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # The folder is the first place where -m looks for modules, so it must not be
                # wherever the user happens to be. A session of its own keeps Ctrl-C away.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd=_IMPORT_ROOT,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._socket = ours

    def exchange(self, frame: bytes, timeout_s: float) -> Rendered | Refused:
        """Send a request and read its reply; no process is left if that fails in any way."""
        assert self._socket is not None
        try:
            self._socket.settimeout(timeout_s)
            send_frame(self._socket, frame)
            return msgspec.msgpack.decode(receive_frame(self._socket), type=Rendered | Refused)
        except BaseException:  # an interrupt too: the next render must not get this one's reply
            self.stop()
            raise

    def kill(self) -> None:
        """End the process, if there is one; any thread may, and `stop` is still to be called."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process, if there is one, reap it and close the socket."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._socket is not None:
            self._socket.close()


def _ending(exit_status: int | None) -> str:
    if exit_status is not None and exit_status < 0:
        return f"killed by {signal.Signals(-exit_status).name}"
    return f"exit status {exit_status}"
