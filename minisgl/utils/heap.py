"""A program's start without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside, nor later of what was there at the end; for programs, not libraries.

    Imports and a vocabulary are some hundred thousand objects that stay. The collector looks
    through all of them several times while they are made, a fifth of a second for `generate`,
    then again while the program works, and once more when it ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
