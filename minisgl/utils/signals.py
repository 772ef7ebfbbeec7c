"""Keeping Ctrl-C out of the middle of things."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["hold_interrupts"]


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a SIGINT inside the block take effect at its end, by the handler there was before.

    Queues and free lists are changed in several statements; an interrupt between two of them
    would lose a row or a page for good. Outside the main thread, and where nothing in Python
    handles SIGINT, there is nothing to hold.
    """
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        for number, frame in held:
            previous(number, frame)
