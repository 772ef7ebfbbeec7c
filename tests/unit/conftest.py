"""What the tests of this tier share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws the same numbers, and the RoPE device set here is forgotten."""
    torch.manual_seed(0)
    monkeypatch.setattr("minisgl.layers.rotary._rope_device", None)


@pytest.fixture(scope="session")
def qwen_tokenizer_path() -> Path:
    """The folder with Qwen 3's tokenizer, which `make setup` fetches where it can."""
    folder = Path(sys.prefix, "share", "qwen3-tokenizer")
    if not folder.is_dir():
        pytest.skip("no Qwen tokenizer: `make clean setup` fetches one, if there is npm")
    return folder
