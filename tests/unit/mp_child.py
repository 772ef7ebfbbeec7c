"""What `test_mp.py` runs as a `Child`, and as a parent that is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from minisgl.utils.mp import Child, exit_with_parent, make_socket_folder, read_spec


class Spec(msgspec.Struct):
    """Arguments of the child."""

    folder: str
    note: str
    """The file where it says who it is, then waits for its end."""
    exit_code: int | None = None
    """Ends with this instead."""
    signals: list[int] = []
    """Sends them to itself before."""
    text: str = ""


class Said(msgspec.Struct):
    """What the child writes down."""

    spec: Spec
    pid: int
    folder: str
    """The current one."""
    session: int


def child() -> None:
    spec = read_spec(Spec)
    exit_with_parent(spec.folder)
    for number in spec.signals:
        signal.raise_signal(number)
    said = Said(spec, os.getpid(), os.getcwd(), os.getsid(0))
    part = Path(spec.note + ".part")
    part.write_bytes(msgspec.json.encode(said))
    part.rename(spec.note)
    if spec.exit_code is not None:
        sys.exit(spec.exit_code)
    while True:
        time.sleep(60)


def parent() -> None:
    folder = make_socket_folder()
    Path(folder, "socket").touch()
    Child("tests.unit.mp_child", Spec(folder, sys.argv[1]), lambda child, code: None)
    time.sleep(60)


if __name__ == "__main__":
    parent() if len(sys.argv) > 1 else child()
