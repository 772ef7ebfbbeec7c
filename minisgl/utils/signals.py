"""Keeping Ctrl-C out of the middle of things."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["catch_interrupts", "hold_interrupts"]


class _Gate:
    """Stands between SIGINT and the handler there was before."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._held: list[tuple[int, Any]] = []
        self.depth = 0  # of `hold_interrupts` blocks

    def handle(self, number: int, frame: Any) -> None:
        if self.depth:
            self._held.append((number, frame))
        else:
            self._previous(number, frame)

    def leave(self) -> None:
        self.depth -= 1
        while self._held and not self.depth:
            self._previous(*self._held.pop(0))


_gate: _Gate | None = None
"""The main thread's, while `catch_interrupts` is active."""


@contextmanager
def catch_interrupts() -> Iterator[None]:
    """Inside the block, `hold_interrupts` costs next to nothing: its handler is there already.

    Changing a handler takes some 20 us, which a loop of steps should not pay each time. Outside
    the main thread, and where nothing in Python handles SIGINT, there is nothing to catch.
    """
    global _gate
    previous: Any = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or _gate is not None or not callable(previous):
        yield
        return
    gate = _Gate(previous)
    try:
        _gate = gate
        signal.signal(signal.SIGINT, gate.handle)
        yield
    finally:
        gate.depth += 1  # nothing escapes between these lines
        signal.signal(signal.SIGINT, previous)
        _gate = None
        gate.leave()


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a SIGINT inside the block take effect at its end, by the handler there was before.

    Queues and free lists are changed in several statements; an interrupt between two of them
    would lose a row or a page for good.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _gate is None:
        with catch_interrupts(), _hold():
            yield
    else:
        with _hold():
            yield


@contextmanager
def _hold() -> Iterator[None]:
    gate = _gate
    if gate is None:  # nothing in Python handles SIGINT
        yield
        return
    gate.depth += 1
    try:
        yield
    finally:
        gate.leave()
