"""What the tests of this tier share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws the same numbers, and the RoPE device set here is forgotten."""
    torch.manual_seed(0)
    monkeypatch.setattr("minisgl.layers.rotary._rope_device", None)
