"""Running the command line, in a process of its own or in this one."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.cli import main

ROOT = Path(__file__).resolve().parents[2]
FAST = ["--dtype", "float32", "--temperature", "0", "--num-pages", "16"]
LIMIT_S = 120


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "minisgl", *arguments]


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_S,
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ours, killed at the end or when it takes too long."""
    process = subprocess.Popen(
        command(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A test run in the background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *named: str) -> None:
    """`main` says what is wrong in one line with these words, and exits with 2."""
    try:
        code: Any = main(arguments)
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert code == 2, said.err
    assert said.out == ""
    assert said.err.endswith("\n")
    [line] = said.err.splitlines()
    assert re.match(rf"minisgl {arguments[0]}( offline)?: error: ", line), line
    for word in named:
        assert word in line
