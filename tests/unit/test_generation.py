"""`Generation`: what whoever made a request sees of its sequences."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import EngineDeadError, RequestFailedError
from minisgl.message import SequenceDelta
from minisgl.server.generation import Generation


def generation(**params: Any) -> tuple[Generation, list[Generation]]:
    """One of uids from 10 on, and those for which an abort was asked."""
    aborted: list[Generation] = []
    complete = SamplingParams(**params).resolve_defaults({})
    return Generation("name", 10, [1], complete, aborted.append), aborted


def delta(uid: int, text: str, end: str | None = None, **more: Any) -> SequenceDelta:
    return SequenceDelta(uid, text, list(text.encode()), [], end, **more)


def test_deltas_that_came_together_are_taken_together() -> None:
    async def main() -> None:
        made, _ = generation()
        made.push(delta(10, "a"))
        made.push(delta(10, "b"))
        turns = made.deltas()
        assert [d.text for d in await anext(turns)] == ["a", "b"]
        asyncio.get_running_loop().call_soon(made.push, delta(10, "c", "stop"))
        assert [d.text for d in await anext(turns)] == ["c"]
        with pytest.raises(StopAsyncIteration):
            await anext(turns)

    asyncio.run(main())


def test_a_result_keeps_the_sequences_apart() -> None:
    async def main() -> None:
        made, _ = generation(n=2)
        made.push(delta(11, "x"))
        made.push(delta(10, "a", "length"))
        assert not made.finished
        made.push(delta(11, "y", "stop", stop_reason=5))
        assert made.finished and made.finish_reasons == ["length", "stop"]
        first, second = (await made.result()).outputs
        assert (first.text, first.token_ids, first.finish_reason) == ("a", [97], "length")
        assert (second.text, second.finish_reason, second.stop_reason) == ("xy", "stop", 5)

    asyncio.run(main())


def test_leaving_the_block_aborts_what_has_not_ended() -> None:
    async def main() -> None:
        open_one, aborted = generation()
        with pytest.raises(KeyError):
            async with open_one:
                raise KeyError
        assert aborted == [open_one]
        ended, aborted = generation()
        async with ended:
            ended.push(delta(10, "a", "stop"))
        assert aborted == []

    asyncio.run(main())


def test_a_failure_reaches_whoever_waits_and_whoever_comes_later() -> None:
    async def main() -> None:
        made, _ = generation(n=2)
        waiting = asyncio.ensure_future(made.result())
        await asyncio.sleep(0)
        made.push(delta(10, "a", "stop"))
        made.fail(EngineDeadError("it is dead"))
        with pytest.raises(EngineDeadError, match="it is dead"):
            await waiting
        with pytest.raises(EngineDeadError, match="it is dead"):
            await anext(made.deltas())
        assert made.finished and made.finish_reasons == ["stop", "error"]

    asyncio.run(main())


def test_a_failure_between_two_turns_is_no_end() -> None:
    async def main() -> None:
        made, _ = generation()
        made.push(delta(10, "a"))
        turns = made.deltas()
        await anext(turns)  # and its caller is busy with that
        made.fail(EngineDeadError("it is dead"))
        with pytest.raises(EngineDeadError, match="it is dead"):
            await anext(turns)

    asyncio.run(main())


def test_a_sequence_that_the_engine_failed_on_raises() -> None:
    async def main() -> None:
        made, _ = generation()
        made.push(delta(10, "a"))
        made.push(delta(10, "", "error"))
        with pytest.raises(RequestFailedError):
            await made.result()

    asyncio.run(main())
