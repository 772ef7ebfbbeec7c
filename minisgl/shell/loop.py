"""`LoopThread`: an asyncio loop for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import aclosing, closing
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")

_GRACE_S = 10.0


class LoopThread:
    """An event loop in a thread of its own.

    Invariant: work whose caller stops waiting, because Ctrl-C was pressed or for whatever other
    reason, is cancelled at once and cleans up in the loop's thread; nobody waits for that before
    `close` does. So no interrupt, however often it comes, can tear the work itself apart.
    """

    def __init__(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    def run(self, work: Awaitable[T]) -> T:
        """What `work` returns or raises."""

        async def once() -> AsyncGenerator[T, None]:
            yield await work

        with closing(self.iterate(once())) as results:
            return next(results)

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What `items` yields or raises, as it comes; closing the iterator cancels the rest."""
        arrived: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()

        async def pass_on() -> None:
            try:
                async with aclosing(items):
                    async for item in items:
                        arrived.put((item,))
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)

        # The loop does what it is told in order, so it does not matter where in here an
        # interrupt comes: what has begun is cancelled, and nothing begins afterwards.
        work = _Work(pass_on())
        try:
            self._loop.call_soon_threadsafe(work.begin)
            while (came := arrived.get()) is not None:
                if isinstance(came, BaseException):
                    raise came
                yield came[0]
        finally:
            self._loop.call_soon_threadsafe(work.cancel)

    def close(self) -> None:
        """End the loop and its thread, after what was cancelled has cleaned up."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_GRACE_S)


class _Work:
    """A coroutine that becomes a task, in the loop's thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)

    def cancel(self) -> None:
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()
