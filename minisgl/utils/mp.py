"""Processes that talk over ZeroMQ: typed one-way sockets, and children that die with their parent.

A `Receiver` binds an address and any number of `Sender`s connect to it. Messages are MessagePack
by `msgspec`, decoded to the type they are expected to be; nothing is unpickled. Addresses are
Unix sockets in a folder that only this user may enter.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from minisgl.errors import ConfigError

from .logger import get_logger

__all__ = [
    "Child",
    "Receiver",
    "Sender",
    "before_exit",
    "exit_with_parent",
    "freeze_heap",
    "how_ended",
    "make_socket_folder",
    "read_spec",
    "remove_folder",
]

T = TypeVar("T")

logger = get_logger(__name__)

_IMPORT_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds this `minisgl`
_running: set[Child] = set()  # children of this process that have not ended
_farewells: list[Callable[[], None]] = []  # what `before_exit` was given
_MAX_SOCKET_PATH = 107  # bytes; the kernel's limit for the name of a Unix socket


def make_socket_folder() -> str:
    """A new folder (mode 0700) for the sockets of one engine."""
    folder = tempfile.mkdtemp(prefix="minisgl-")
    if len(os.fsencode(folder)) + 32 > _MAX_SOCKET_PATH:
        remove_folder(folder)
        raise ConfigError(f"the folder for temporary files, {folder!r}, is too long: set TMPDIR")
    return folder


def remove_folder(folder: str) -> None:
    """Remove it and the sockets in it; no error if it is gone."""
    shutil.rmtree(folder, ignore_errors=True)


class Sender(Generic[T]):
    """Sends messages to one address; may be shared by threads. Never blocks: what the other side
    has not read waits in memory."""

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PUSH)
        self._socket.connect(f"ipc://{address}")
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # a ZeroMQ socket belongs to one thread at a time

    def send(self, message: T) -> None:
        """Queue a message; one to a process that is gone is lost."""
        data = self._encoder.encode(message)
        with self._lock:
            if not self._socket.closed:
                self._socket.send(data)

    def close(self) -> None:
        """Close it, giving what was sent a second to leave."""
        with self._lock:
            self._socket.close(linger=1000)


class Receiver(Generic[T]):
    """Receives the messages that are sent to an address, in one thread.

    What is no message of the `kind` is logged and dropped: no process of ours sent it, and those
    that others wait for go on.
    """

    def __init__(self, address: str, kind: Any) -> None:
        self._socket = _socket(zmq.PULL)
        self._socket.bind(f"ipc://{address}")
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def fileno(self) -> int:
        """A file descriptor that is readable whenever there may be something to `receive`."""
        number = self._socket.getsockopt(zmq.FD)
        assert isinstance(number, int)
        return number

    def receive(self, *, wait: bool) -> list[T]:
        """All messages that are there; with `wait`, once something has come."""
        messages: list[T] = []
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                data = self._socket.recv(flags)
            except zmq.Again:
                return messages
            flags = zmq.NOBLOCK
            try:
                messages.append(self._decoder.decode(data))
            except (msgspec.MsgspecError, RecursionError) as error:
                logger.error("Dropped %d bytes that are no message: %s", len(data), error)

    def close(self) -> None:
        """Close it and remove the socket's file."""
        self._socket.close(linger=0)


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a slow reader must not block a writer
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


class Child:
    """A Python module run as a process of its own, `python -m module`.

    It gets its arguments as one JSON line on stdin, which then stays open: when it ends, because
    the parent closed it or died in whatever way, so does the child. `on_exit` is called, in a
    thread, with the exit code (negative: the signal that killed it). The child's folder is not
    the parent's, and Ctrl-C at the parent's terminal does not reach it.
    """

    def __init__(
        self, module: str, spec: msgspec.Struct, on_exit: Callable[[Child, int], None]
    ) -> None:
        self.module = module
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL,
            # The first place where -m looks for modules must not be wherever the user happens to
            # be: a folder with somebody's model, and a `json.py` in it.
            cwd=_IMPORT_ROOT,
            start_new_session=True,
        )
        _running.add(self)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died already: `on_exit` tells
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()
        self._watcher = threading.Thread(target=self._watch, name=f"watch {module}", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _watch(self) -> None:
        code = self._process.wait()
        _running.discard(self)
        self._on_exit(self, code)

    def kill(self) -> None:
        """End it at once, also if it is stopped; does not wait."""
        self._process.kill()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Let it end by closing its stdin; kill it if it takes longer. Waits for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has died already, or was told
            self._process.stdin.write(b"\n")  # it is asked to end: its parent has not died
            self._process.stdin.flush()
        with contextlib.suppress(OSError, ValueError):  # or another thread is just closing it
            self._process.stdin.close()
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()


def how_ended(code: int) -> str:
    """In words how a `Child` came to its exit code."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal: most have no name
        return f"was killed by signal {-code}"


def read_spec(kind: type[T]) -> T:
    """In a `Child`'s main: its arguments."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def exit_with_parent(folder: str | None = None) -> None:
    """In a `Child`'s main, after `read_spec`: end this process when the parent closes its stdin.

    A service manager's SIGTERM reaches every process of a service, and how requests end is the
    parent's to say: it is ignored here, and so is SIGINT. `folder`, that of the sockets if there
    are any, is removed for a parent that can't do it any more. Children of this process are killed:
    one that is stopped would not see that its stdin ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        is_asked = False
        while os.read(0, 4096):
            is_asked = True
        for farewell in _farewells if is_asked else ():
            farewell()
        if folder is not None:
            remove_folder(folder)
        for child in list(_running):
            child.kill()
        os._exit(0)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()


def before_exit(function: Callable[[], None]) -> None:
    """In a `Child`: have this called, in a thread, before the process ends because its parent
    asked for that, and not because the parent died."""
    _farewells.append(function)


def freeze_heap() -> None:
    """Leave what a process made while it started, which stays, to no garbage collection again.

    Imports alone are some hundred thousand objects, and looking through them takes tens of
    milliseconds, for everybody who waits.
    """
    gc.collect()
    gc.freeze()
