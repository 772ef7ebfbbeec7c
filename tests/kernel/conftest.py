"""Triton kernels are tested on a GPU where there is one, else under Triton's interpreter.

The interpreter is chosen by an environment variable that Triton reads when a kernel is decorated,
so it is set before anything imports one.
"""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return DEVICE
