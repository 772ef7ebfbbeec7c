"""`AsyncEngine` and its parts without a model: requests and their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import (
    BusyError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from minisgl.message import (
    Abort,
    Deltas,
    EngineReady,
    Flush,
    Flushed,
    SequenceDelta,
    Submit,
)
from minisgl.server import async_engine
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.generation import Generation
from tests.unit.test_text_side import FakeSender, stats

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "qwen3-0.6b.json"
READY = EngineReady(64, 2, 96, 6, 16, "cpu", "float32", 1)


# -- Generation: what its caller sees ---------------------------------------------------------


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


# -- AsyncEngine: requests and ends -----------------------------------------------------------


class FakeProcesses:
    """What the engine starts: ready at once; its text side and scheduler are lists."""

    def __init__(self, path: str, tokenizer: Any, config: Any, options: Any, *calls: Any) -> None:
        self.deliver, self.die = calls
        self.is_ready = False
        self.closed = False
        self.on_flushed: Callable[[Flushed], None] = lambda message: None
        self.scheduler = FakeSender()
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.text = self

    async def start(self) -> EngineReady:
        self.is_ready = True
        return READY

    async def close(self) -> None:
        self.closed = True

    def submit(self, message: Submit) -> None:
        self.submitted.append(message)

    def abort(self, message: Abort) -> None:
        self.aborted += message.uids

    def end(self, *uids: int, reason: str = "length") -> None:
        """A step in which these sequences end."""
        self.deliver(Deltas([SequenceDelta(uid, "x", [5], [], reason) for uid in uids], stats()))


Test = Callable[[AsyncEngine, FakeProcesses], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test with a started engine that may hold four sequences."""
    (tmp_path / "config.json").write_text(CONFIG.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(async_engine, "Processes", FakeProcesses)

    def run(test: Test, **options: Any) -> None:
        async def main() -> None:
            engine = AsyncEngine(tmp_path, **{"max_queued_requests": 2, **options})
            async with engine:
                processes: Any = engine._processes
                await test(engine, processes)
            assert processes.closed

        asyncio.run(main())

    return run


def test_a_request_is_followed_from_submission_to_its_end(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        [made] = engine.submit([[1, 2]], SamplingParams(n=2), request_id="a")
        assert engine.num_live == 2
        [message] = processes.submitted
        assert (message.first_uid, message.token_ids) == (made.first_uid, [1, 2])
        assert message.params.max_tokens == 16
        processes.end(made.first_uid)
        assert engine.num_live == 1
        processes.end(made.first_uid + 1)
        assert engine.num_live == 0
        assert [output.text for output in (await made.result()).outputs] == ["x", "x"]
        processes.end(made.first_uid)  # nobody's any more

    run(test)


def test_max_tokens_is_what_fits(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        engine.submit([[1] * 10], SamplingParams(), request_id="a", fill_context=True)
        engine.submit([[1] * 60], SamplingParams(max_tokens=1000), request_id="b")
        filled, _ = (message.params.max_tokens for message in processes.submitted)
        assert filled == 64 - 10
        with pytest.raises(InvalidRequestError, match="64 tokens.*max_model_len 64"):
            engine.submit([[1] * 64], SamplingParams(), request_id="c")
        with pytest.raises(InvalidRequestError, match="no tokens"):
            engine.submit([[]], SamplingParams(), request_id="c")

    run(test)


def test_several_prompts_are_taken_all_or_none(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        with pytest.raises(InvalidRequestError):
            engine.submit([[1], []], SamplingParams(), request_id="a")
        with pytest.raises(BusyError, match="0 sequences.*6 more.*2 may run.*2 wait"):
            engine.submit([[1], [2]], SamplingParams(n=3), request_id="a")
        assert engine.num_live == 0 and processes.submitted == []
        made = engine.submit([[1], [2]], SamplingParams(n=2), request_id="a")
        assert [one.request_id for one in made] == ["a-0", "a-1"]
        with pytest.raises(BusyError, match="--max-queued-requests"):
            engine.submit([[1]], SamplingParams(), request_id="b")
        processes.end(0)
        engine.submit([[1]], SamplingParams(), request_id="b")

    run(test)


def test_abort_by_request_id(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        first, second = engine.submit([[1], [2]], SamplingParams(), request_id="a")
        [third] = engine.submit([[3]], SamplingParams(n=2), request_id="b")
        assert engine.abort("nobody") == 0 and processes.aborted == []
        assert engine.abort("a-1") == 1 and processes.aborted == [second.first_uid]
        assert engine.abort("a") == 2
        assert engine.num_live == 4, "they live until the engine says so"
        processes.end(first.first_uid, second.first_uid, reason="abort")
        processes.aborted.clear()
        assert engine.abort(None) == 2
        assert processes.aborted == [third.first_uid, third.first_uid + 1]

    run(test)


def test_draining_waits_for_the_end_then_aborts(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        await engine.drain(0)  # nothing to wait for
        engine.submit([[1]], SamplingParams(), request_id="a")
        draining = asyncio.ensure_future(engine.drain(60))
        await asyncio.sleep(0)
        processes.end(0)
        await draining
        assert processes.aborted == []
        engine.submit([[1]], SamplingParams(), request_id="a")
        draining = asyncio.ensure_future(engine.drain(0))
        while not processes.aborted:
            await asyncio.sleep(0)
        processes.end(1, reason="abort")
        await draining

    run(test)


def test_a_death_fails_everything_at_once_and_for_good(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        [made] = engine.submit([[1]], SamplingParams(n=2), request_id="a")
        flushing = asyncio.ensure_future(engine.flush_cache())
        await asyncio.sleep(0)
        assert processes.scheduler.sent == [Flush(0)]
        processes.die(EngineDeadError("killed"))
        processes.die(EngineDeadError("its consequence"))
        for broken in (made.result(), flushing, engine.encode("a"), engine.generate([1])):
            with pytest.raises(EngineDeadError, match="killed"):
                await broken
        with pytest.raises(EngineDeadError, match="killed"):
            engine.submit([[1]], SamplingParams(), request_id="b")
        assert engine.died.is_set() and engine.num_live == 0
        assert str(engine.error) == "killed"
        await engine.drain(60)  # nothing is left to wait for

    run(test)


def test_closing_fails_what_runs(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        [made] = engine.submit([[1]], SamplingParams(), request_id="a")
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await made.result()
        with pytest.raises(BusyError, match="closed"):
            engine.submit([[1]], SamplingParams(), request_id="b")
        with pytest.raises(RuntimeError, match="once"):
            await engine.start()

    run(test)


def test_a_flush_gets_its_own_answer(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        flushes = [asyncio.ensure_future(engine.flush_cache()) for _ in range(2)]
        await asyncio.sleep(0)
        first, second = (message.ticket for message in processes.scheduler.sent)
        processes.on_flushed(Flushed(second, 2))
        processes.on_flushed(Flushed(first, 1))
        processes.on_flushed(Flushed(99, 3))
        assert [await flush for flush in flushes] == [1, 2]

    run(test)


def test_leaving_a_stream_aborts_it(run: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        stream = engine.stream([1, 2])
        following = asyncio.ensure_future(anext(stream))
        while not processes.submitted:
            await asyncio.sleep(0)
        processes.deliver(Deltas([SequenceDelta(0, "x", [5], [])], stats()))
        assert (await following).text == "x"
        assert processes.aborted == []
        await stream.aclose()
        assert processes.aborted == [0]

    run(test)


def test_observers_are_told_of_each_step_once(run: Any) -> None:
    class Observer:
        def __init__(self) -> None:
            self.told: list[str] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: self.told.append(name)

    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        observer: Any = Observer()
        engine.observers.append(observer)
        engine.submit([[1]], SamplingParams(), request_id="a")
        processes.deliver(Deltas([SequenceDelta(0, "x", [5], [])], stats(1.0)))
        processes.deliver(Deltas([], stats(1.0)))  # another worker's part of the same step
        processes.deliver(Deltas([SequenceDelta(0, "x", [5], [], "stop")], stats(2.0)))
        assert observer.told == ["on_submit"] + ["on_delta", "on_stats"] + [
            "on_delta",
            "on_end",
            "on_stats",
        ]
        assert engine.stats == stats(2.0)

    run(test)
