"""A pytest plugin (`-p tests.other_library`): the native kernels come from another library.

`MINISGL_TEST_LIBRARY` names it. `tests/unit/test_native_builds.py` runs the kernels' tests so on
libraries built for other instruction sets and with sanitizers. These see only what is allocated
one by one, so each weight and KV pool is.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from minisgl.kernel.cpu import build
from minisgl.utils import memory

_PATH = Path(os.environ["MINISGL_TEST_LIBRARY"])


def _other(extra_flags: tuple[str, ...] = ()) -> Path:
    assert not extra_flags
    return _PATH


def _zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _take(arena: memory.Arena, num_bytes: int) -> torch.Tensor:
    return _zeros(num_bytes)


build.build = _other
memory.zeros = _zeros
memory.Arena.take = _take  # type: ignore[method-assign]


def pytest_report_header() -> str:
    """Shows in the output that it was this library."""
    return f"native kernels: {build.library()._name}"
