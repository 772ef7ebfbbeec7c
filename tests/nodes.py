"""What tests of ranks and nodes share: a second node by the command line, ends that come soon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from minisgl.errors import EngineDeadError

ROOT = Path(__file__).resolve().parents[1]
FOLLOWER = "minisgl.scheduler.follower"
SOON_S = 10


def free_address() -> str:
    """HOST:PORT of this host on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def flags(options: dict[str, Any]) -> list[str]:
    """Those of fields of the configuration."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def failing(action: Callable[[], Any]) -> str:
    """The message of the `EngineDeadError` that comes soon."""
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        action()
    assert time.monotonic() - start < SOON_S
    return str(caught.value)


class Node:
    """`minisgl serve --node-rank K`."""

    def __init__(self, process: subprocess.Popen[bytes], written: IO[bytes]) -> None:
        self.process = process
        self._written = written

    @property
    def log(self) -> str:
        """What it and its ranks have written so far."""
        size = os.fstat(self._written.fileno()).st_size
        return os.pread(self._written.fileno(), size, 0).decode()

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, in the order of their start."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        found = [child for child in found if FOLLOWER in child.cmdline()]
        return sorted(found, key=lambda child: child.create_time())

    def ended(self) -> int:
        """Its exit code, which comes soon."""
        return self.process.wait(SOON_S)


@contextmanager
def node(model: Path, address: str, options: Sequence[str]) -> Iterator[Node]:
    """Node 1 of 2, with these flags; killed at the end if it still runs."""
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(model), *options]
    place = ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address]
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            [*command, *place],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            yield Node(process, written)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end soon; whose parent has not looked after them yet have."""
    deadline = time.monotonic() + SOON_S
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
