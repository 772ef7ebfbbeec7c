"""Starts that fail: one line that says why, exit code 2, at once, and nothing is left."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.server.life import watched

SOON_S = 30
"""Mostly what Python takes to import torch, in two processes one after another."""


def failure(model: str, *flags: str) -> str:
    """The line with which a start fails."""
    with watched(model, *flags, "--log-level", "warning", ready=False) as server:
        deadline = time.monotonic() + SOON_S
        while server.server.process.poll() is None:
            server.children()
            assert time.monotonic() < deadline, server.server.stderr
            time.sleep(0.01)
        assert server.server.process.returncode == 2, server.server.stderr
        assert server.server.stdout == ""
        assert server.leaves_nothing(), server.left_behind()
        lines = server.server.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("minisgl serve: error: ")
    return lines[0]


@pytest.fixture
def broken(tiny_model: str, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_model_that_is_not_there() -> None:
    assert "/no/such/model" in failure("/no/such/model")


def test_weights_that_are_cut_off(broken: Path) -> None:
    """The scheduler's process finds it, and its message is told."""
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in failure(str(broken))


def test_weights_that_lack_a_tensor(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] += 1
    (broken / "config.json").write_text(json.dumps(config), "utf-8")
    line = failure(str(broken), "--tokenizer-workers", "1")
    assert "layers.3" in line


def test_a_tokenizer_that_can_not_be_read(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{", "utf-8")
    assert "tokenizer.json" in failure(str(broken))


def test_a_cache_that_does_not_fit(tiny_model: str) -> None:
    assert "--num-pages" in failure(tiny_model, "--num-pages", str(10**12))


def test_a_port_that_is_in_use(tiny_model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = failure(tiny_model, "--port", str(port))
    assert f"--port {port}" in line and "in use" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shutdown-timeout", "-1"], "--shutdown-timeout = -1"),
        (["--trace-file", "/no/such/folder/trace.json"], "--trace-file"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_flag_that_is_wrong(tiny_model: str, flags: list[str], message: str) -> None:
    assert message in failure(tiny_model, *flags)
