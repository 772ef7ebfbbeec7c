"""What the tests of this tier share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on two threads, and ten times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """An engine collects garbage when it closes: 0.2 s with all that `transformers` imports,
    which is put aside here."""
    gc.freeze()
    yield
    gc.unfreeze()
