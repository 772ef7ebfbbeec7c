"""A pytest plugin (`-p tests.other_library`): the native kernels come from another library.

`MINISGL_TEST_LIBRARY` names it. `tests/unit/test_native_builds.py` runs the kernels' tests so on
libraries built for other instruction sets and with sanitizers.
"""

from __future__ import annotations

import os
from pathlib import Path

from minisgl.kernel.cpu import build

_PATH = Path(os.environ["MINISGL_TEST_LIBRARY"])


def _other(extra_flags: tuple[str, ...] = ()) -> Path:
    assert not extra_flags
    return _PATH


build.build = _other


def pytest_report_header() -> str:
    """Shows in the output that it was this library."""
    return f"native kernels: {build.library()._name}"
