"""The process that renders chat templates; `renderer.py` starts it, feeds it and ends it.

It reads frames (a length and MessagePack) from the socket that is its standard input, and
answers each in turn. A render that uses up its CPU time or its memory ends the whole process,
since nothing short of that is sure to end it: the kernel stops the former even inside one long C
call, and after the latter the heap is in pieces. The exit status says which limit it was.

Text travels as bytes that keep lone surrogates, and variables as JSON, which knows integers of
any size and NaN: MessagePack has none of them, and a template must see what it would see in the
engine's own process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys

import msgspec

from ..errors import ChatTemplateError
from .chat_template import run_template

__all__ = [
    "EXIT_TOO_MUCH_MEMORY",
    "EXIT_TOO_MUCH_TIME",
    "Refused",
    "Render",
    "Rendered",
    "pack_text",
    "receive_frame",
    "send_frame",
    "unpack_text",
]

EXIT_TOO_MUCH_TIME = -signal.SIGPROF  # as `subprocess` writes the signal that ended a process
EXIT_TOO_MUCH_MEMORY = 77
MAX_TEXT_CHARS = 1 << 25  # a prompt of that length is beyond every model's context

_LENGTH = struct.Struct("<Q")


class Render(msgspec.Struct, array_like=True):
    """Run a template (text) with its variables (JSON)."""

    source: bytes
    variables: bytes


class Rendered(msgspec.Struct, tag=True, array_like=True):
    """The template's text."""

    text: bytes


class Refused(msgspec.Struct, tag=True, array_like=True):
    """A ChatTemplateError."""

    message: bytes
    param: str | None


def pack_text(text: str) -> bytes:
    """Any `str` as bytes, also one that is no valid Unicode."""
    return text.encode("utf-8", "surrogatepass")


def unpack_text(data: bytes) -> str:
    """The inverse of `pack_text`."""
    return data.decode("utf-8", "surrogatepass")


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Send one frame; OSError if the other side is gone or does not read in time."""
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def receive_frame(connection: socket.socket) -> bytearray:
    """The next frame; EOFError if the other side is gone, TimeoutError if it takes too long."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return data


def main() -> None:
    """Serve until the other end of the socket closes. Arguments: CPU seconds, bytes of memory."""
    cpu_limit_s, memory_limit_bytes = float(sys.argv[1]), int(sys.argv[2])
    # Whoever started this process ends it; signals to the whole group are not for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory(memory_limit_bytes)
    # Not closed here: the parent is to see its end only once the exit status is certain.
    connection = socket.socket(fileno=sys.stdin.fileno())
    try:
        while True:
            frame = receive_frame(connection)
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            reply = msgspec.msgpack.encode(_answer(frame))
            signal.setitimer(signal.ITIMER_PROF, 0)
            send_frame(connection, reply)
    except MemoryError:
        os._exit(EXIT_TOO_MUCH_MEMORY)
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone


def _limit_memory(limit_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answer(frame: bytearray) -> Rendered | Refused:
    request = msgspec.msgpack.decode(frame, type=Render)
    try:
        text = run_template(unpack_text(request.source), json.loads(request.variables))
        if len(text) > MAX_TEXT_CHARS:
            raise ChatTemplateError(
                f"The chat template made a text of {len(text)} characters of these messages; "
                f"more than {MAX_TEXT_CHARS} are not taken",
                "messages",
            )
    except ChatTemplateError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return Refused(pack_text(str(error)), error.param)
    return Rendered(pack_text(text))


if __name__ == "__main__":
    main()
