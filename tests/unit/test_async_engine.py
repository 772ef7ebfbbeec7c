"""`AsyncEngine` without a model: requests and their ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import BusyError, EngineDeadError, InvalidRequestError
from minisgl.llm.requests import RequestBuilder
from minisgl.message import (
    Abort,
    Answer,
    Deltas,
    EngineReady,
    Flush,
    Flushed,
    SequenceDelta,
    Submit,
)
from minisgl.server import async_engine
from minisgl.server.async_engine import AsyncEngine
from tests.unit.fake_async_engine import byte_tokenizer
from tests.unit.observed import step
from tests.unit.test_text_side import FakeSender, stats

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "qwen3-0.6b.json"
READY = EngineReady(64, 2, 96, 6, 16, "cpu", "float32", 1)


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
        engine.submit([[1]], SamplingParams(), request_id="first")
        processes.submitted.clear()
        with pytest.raises(BusyError, match="1 sequences.*4 more.*2 may run.*2 wait"):
            engine.submit([[1], [2]], SamplingParams(n=2), request_id="a")
        assert engine.num_live == 1 and processes.submitted == []
        processes.end(0)
        assert engine.num_live == 0 and processes.submitted == []
        made = engine.submit([[1], [2]], SamplingParams(n=2), request_id="a")
        assert [one.request_id for one in made] == ["a-0", "a-1"]
        with pytest.raises(BusyError, match="--max-queued-requests"):
            engine.submit([[1]], SamplingParams(), request_id="b")
        processes.end(made[0].first_uid)
        engine.submit([[1]], SamplingParams(), request_id="b")

    run(test)


@pytest.mark.parametrize(("prompts", "n", "param"), [(1, 5, "n"), (5, 1, "prompt")])
def test_more_sequences_than_can_ever_be_there_are_not_a_matter_of_waiting(
    run: Any, prompts: int, n: int, param: str
) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        with pytest.raises(InvalidRequestError, match="5 sequences.* 2 may run.* 2 wait") as caught:
            engine.submit([[1]] * prompts, SamplingParams(n=n), request_id="a")
        assert caught.value.param == param
        engine.check_count(4)
        with pytest.raises(InvalidRequestError, match="5 sequences") as caught:
            engine.check_count(5, "input_ids")
        assert caught.value.param == "input_ids"
        assert engine.num_live == 0 and processes.submitted == []

    run(test)


UNSENDABLE: list[tuple[dict[str, Any], str]] = [
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"priority": 2**70}, "priority"),
    ({"prompts": [[1], [2**70]]}, "prompt"),
    ({"prompts": [[1], [1.5, object()]]}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), UNSENDABLE, ids=lambda value: repr(value)[:30])
def test_what_can_not_be_sent_is_refused_before_anything_is(
    run: Any, change: dict[str, Any], param: str
) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        options = {"prompts": [[1], [2]], "params": SamplingParams(), "request_id": "a", **change}
        with pytest.raises(InvalidRequestError) as caught:
            engine.submit(**options)
        assert caught.value.param == param
        assert engine.num_live == 0 and processes.submitted == []
        await engine.drain(60)  # nothing to wait for
        assert engine.abort("a") == 0

    run(test)


def test_a_send_that_fails_leaves_nothing_behind(run: Any, monkeypatch: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        def submit(message: Submit) -> None:
            if message.token_ids == [2]:
                raise OSError("no socket")
            processes.submitted.append(message)

        monkeypatch.setattr(processes, "submit", submit)
        with pytest.raises(OSError, match="no socket"):
            engine.submit([[1], [2], [3]], SamplingParams(), request_id="a")
        [sent] = processes.submitted
        assert processes.aborted == [sent.first_uid]
        assert engine.num_live == 0
        processes.end(sent.first_uid, reason="abort")  # nobody's
        await engine.drain(60)
        [made] = engine.submit([[1]], SamplingParams(), request_id="a")
        assert made.request_id == "a" and engine.num_live == 1

    run(test)


def test_the_same_parameters_of_many_prompts_are_resolved_once(run: Any, monkeypatch: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        resolved = []
        resolve = SamplingParams.resolve_defaults

        def counted(self: SamplingParams, *args: Any, **options: Any) -> SamplingParams:
            resolved.append(self)
            return resolve(self, *args, **options)

        monkeypatch.setattr(SamplingParams, "resolve_defaults", counted)
        first, second = SamplingParams(logit_bias={5: 1.0}), SamplingParams(temperature=0.5)
        engine.submit([[1]] * 4, [first, first, second, first], request_id="a")
        assert resolved == [first, second]
        biases = [message.params.logit_bias for message in processes.submitted]
        assert biases == [{5: 1.0}, {5: 1.0}, {}, {5: 1.0}]

    run(test)


class AnsweringText:
    """Tokenizes in place of the processes, and keeps what it was asked."""

    def __init__(
        self,
        monkeypatch: Any,
        engine: AsyncEngine,
        processes: FakeProcesses,
        vocab_size: int = 300,
    ) -> None:
        self.asked: list[Any] = []
        info = engine.model_info
        info = replace(info, config=replace(info.config, vocab_size=vocab_size))
        builder = RequestBuilder.of(info, byte_tokenizer())
        monkeypatch.setattr(engine, "_builder", builder)
        monkeypatch.setattr(engine, "_admission", replace(engine._admission, builder=builder))
        monkeypatch.setattr(processes, "ask", self.ask, raising=False)

    async def ask(self, question: Any) -> Answer:
        self.asked.append(question)
        return Answer(question.ticket, byte_tokenizer().encode(question.text))


def test_a_text_that_is_certainly_too_long_is_not_tokenized(run: Any, monkeypatch: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        text = AnsweringText(monkeypatch, engine, processes)
        longest = engine.max_prompt_len * len("<|begin|>")  # the longest token
        assert len(await engine.encode("a" * longest)) == longest, "it might have been that token"
        text.asked.clear()
        with pytest.raises(InvalidRequestError, match=r"568 characters.* 64 tokens.*model_len 64"):
            await engine.encode("a" * (longest + 1))
        assert text.asked == []

    run(test)


def test_ids_are_checked_whoever_they_come_from(run: Any, monkeypatch: Any) -> None:
    async def test(engine: AsyncEngine, processes: FakeProcesses) -> None:
        size = engine.model_info.config.vocab_size
        assert await engine.encode([0, size - 1]) == [0, size - 1]
        for bad in (-1, size, 2**70, 1.0, True, "1", None):
            with pytest.raises(InvalidRequestError, match=re.escape(f"token id {bad!r} is not")):
                await engine.encode([0, bad, 1])
        with pytest.raises(InvalidRequestError, match="has 64 tokens"):
            await engine.encode([size] * 64)
        text = AnsweringText(monkeypatch, engine, processes, vocab_size=100)
        with pytest.raises(InvalidRequestError, match="token id 122 is not in the vocabulary"):
            await engine.encode("az")
        assert len(text.asked) == 1

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
        # Another worker's part of the same step, which tells of those that were read meanwhile.
        processes.deliver(Deltas([], stats(1.0), [step(1), step(2)]))
        processes.deliver(Deltas([SequenceDelta(0, "x", [5], [], "stop")], stats(2.0)))
        assert observer.told == ["on_submit"] + ["on_delta", "on_stats"] + [
            "on_step",
            "on_step",
            "on_delta",
            "on_end",
            "on_stats",
        ]
        assert engine.stats == stats(2.0)

    run(test)
