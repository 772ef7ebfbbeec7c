"""Answers with many log-probabilities: bounded, and written beside the event loop.

entry     a token with its logprob at one place of a prompt or an output; `top_logprobs: 20`
          makes 21 a place
JsonList  entries as JSON, written a few at a time: neither the objects of all of them nor
          one long call of the encoder, which no other thread could interrupt
apart     does the writing in a thread, if there is much
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequestError

if TYPE_CHECKING:
    from .async_engine import AsyncEngine

__all__ = [
    "JsonList",
    "apart",
    "check_echo",
    "check_entries",
    "num_entries",
    "written",
]

MAX_ENTRIES = 3_000_000
"""In one answer, about 200 MB: what one sequence of 128 Ki tokens has with 20 logprobs each."""
MAX_REPEATED = 300_000
"""In one answer that each event of a stream repeats."""
MAX_ECHO = 1 << 26
"""Characters of prompts in one answer."""
LARGE = 2_000
"""Entries, or as small values: more take a thread. Some milliseconds of work."""
_SLICE = 64

T = TypeVar("T")


class JsonList:
    """A JSON list that grows; `raw` is what it is so far."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._bytes = bytearray()
        self.extend(items)

    def extend(self, items: Iterable[Any]) -> None:
        """Write further items."""
        rest: Iterator[Any] = iter(items)
        while part := list(islice(rest, _SLICE)):
            if self._bytes:
                self._bytes += b","
            self._bytes += msgspec.json.encode(part)[1:-1]

    def copy(self) -> JsonList:
        """One that grows by itself."""
        other = JsonList()
        other._bytes = self._bytes[:]
        return other

    def raw(self) -> Any:
        """The list, as what msgspec writes without looking into it."""
        return msgspec.Raw(b"".join((b"[", self._bytes, b"]")))


def written(items: Iterable[T]) -> list[T]:
    """The list of the items as JSON; for type checkers it is what clients will read."""
    return cast("list[T]", JsonList(items).raw())


async def apart(size: int, make: Callable[[], T]) -> T:
    """What `make` returns; called in a thread if `size` is large."""
    return await asyncio.to_thread(make) if size > LARGE else make()


def num_entries(prompt_len: int, params: SamplingParams, num_output_tokens: int) -> int:
    """Log-probabilities of a prompt with so many tokens of output."""
    tops = (params.prompt_logprobs, params.logprobs)
    of_prompt, of_output = (0 if top is None else top + 1 for top in tops)
    return prompt_len * of_prompt + num_output_tokens * of_output


def check_entries(
    engine: AsyncEngine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    lower: Sequence[str],
    *,
    fill_context: bool = False,
    repeated: bool = False,
) -> None:
    """Raise `InvalidRequestError` if the answer could have too many entries.

    `lower` names the parameters that could be lower, `fill_context` is that of `submit`, and
    `repeated` says whether each event of a stream has them all again.
    """
    most = MAX_REPEATED if repeated else MAX_ENTRIES
    count = 0
    for ids, one in zip(prompts, params, strict=True):
        if one.logprobs is None and one.prompt_logprobs is None:
            continue
        room = max(engine.max_prompt_len + 1 - len(ids), 0)
        defaults = engine.model_info.generation_defaults
        complete = one.resolve_defaults(defaults, max_tokens=room if fill_context else 16)
        count += one.n * num_entries(len(ids), one, min(complete.max_tokens or 0, room))
    if count > most:
        raise InvalidRequestError(
            f"the answer could have {count} log-probabilities, at most {most} go into one: lower "
            f"{' or '.join(lower)}",
            lower[0],
        )


def check_echo(echoes: Iterable[str], n: int) -> None:
    """Raise `InvalidRequestError` if `n` times these prompts are too much for an answer."""
    count = n * sum(map(len, echoes))
    if count > MAX_ECHO:
        raise InvalidRequestError(
            f"with echo the answer has the prompts n times, which is {count} characters, at most "
            f"{MAX_ECHO} go into one: lower n, or set echo = false",
            "echo",
        )
