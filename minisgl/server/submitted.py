"""The generations of one request, of which there is one a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from minisgl.message import SequenceDelta

from .generation import Generation

__all__ = ["Arrival", "Submitted", "aborted_on_error", "merged"]


class Arrival(NamedTuple):
    """Deltas of one of several generations."""

    prompt: int
    """Index of the generation."""
    deltas: list[SequenceDelta]


class Submitted:
    """Leaving its `async with` block aborts what has not ended."""

    def __init__(self, request_id: str, generations: Sequence[Generation]) -> None:
        self.request_id = request_id
        """What the engine knows the request by."""
        self._generations = generations

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _abort(self._generations)


@contextmanager
def aborted_on_error(generations: Sequence[Generation]) -> Iterator[None]:
    """Between `submit` and the `async with` block of their `Submitted`."""
    try:
        yield
    except BaseException:
        _abort(generations)
        raise


def _abort(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.abort()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[Arrival, None]:
    """The deltas of all generations as they come; raises the first error of any."""
    if len(generations) == 1:
        async for deltas in generations[0].deltas():
            yield Arrival(0, deltas)
        return
    arrivals: asyncio.Queue[Arrival | Exception | None] = asyncio.Queue()  # None: one has ended

    async def forward(prompt: int, generation: Generation) -> None:
        try:
            async for deltas in generation.deltas():
                arrivals.put_nowait(Arrival(prompt, deltas))
        except Exception as error:
            arrivals.put_nowait(error)
        else:
            arrivals.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(*item)) for item in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
