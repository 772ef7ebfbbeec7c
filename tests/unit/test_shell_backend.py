"""The chat on an `AsyncEngine`, and the event loop's thread that it stands on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import ChatTemplateError, ConfigError, EngineDeadError, InvalidRequestError
from minisgl.server.generation import Generation
from minisgl.shell import Chunk
from minisgl.shell.engine_backend import EngineBackend
from minisgl.shell.loop import LoopThread
from tests.unit.fake_async_engine import VOCAB_SIZE, FakeAsyncEngine, Step, answer
from tests.unit.scripted_chat import heeding_ctrl_c, press_ctrl_c, talk

LIMIT_S = 30
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "loop" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


# -- the loop's thread -----------------------------------------------------------------------


async def letters(text: str, error: Exception | None = None) -> AsyncGenerator[str, None]:
    for letter in text:
        await asyncio.sleep(0)
        yield letter
    if error is not None:
        raise error


def test_what_a_coroutine_returns_or_raises(loop: LoopThread) -> None:
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ZeroDivisionError):
        loop.run(letters("", ZeroDivisionError()).__anext__())


def test_what_a_generator_yields_then_raises(loop: LoopThread) -> None:
    assert "".join(loop.iterate(letters("abc"))) == "abc"
    seen = []
    with pytest.raises(ZeroDivisionError):
        for letter in loop.iterate(letters("ab", ZeroDivisionError())):
            seen.append(letter)
    assert seen == ["a", "b"]


class Endless:
    """Yields "a", then nothing more; `began` and `cleaned` tell how far it got."""

    def __init__(self) -> None:
        self.began, self.cleaned = threading.Event(), threading.Event()

    async def items(self) -> AsyncGenerator[str, None]:
        try:
            yield "a"
            self.began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up may take turns of the loop
            self.cleaned.set()


def test_a_closed_iterator_cancels_the_rest_at_once(loop: LoopThread) -> None:
    endless = Endless()
    stream = loop.iterate(endless.items())
    assert next(stream) == "a"
    assert endless.began.wait(LIMIT_S)
    stream.close()
    assert endless.cleaned.wait(LIMIT_S)


def test_closing_the_loop_waits_for_what_cleans_up() -> None:
    loop, endless = LoopThread(), Endless()
    stream = loop.iterate(endless.items())
    assert next(stream) == "a"
    stream.close()
    loop.close()
    assert endless.cleaned.is_set()
    loop.close()  # again: nothing to do


def test_ctrl_c_wakes_whoever_waits(loop: LoopThread) -> None:
    cleaned = threading.Event()

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(press_ctrl_c)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
        loop.run(wait())
    assert cleaned.wait(LIMIT_S)


# -- the engine ------------------------------------------------------------------------------


def test_an_answer_of_the_engine_with_its_counts() -> None:
    engine = FakeAsyncEngine(lambda ids, choice: answer("Grüße"))
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    chunks = list(backend.stream(HI, SamplingParams(temperature=0)))
    backend.close()
    assert "".join(chunk.text for chunk in chunks) == "Grüße"
    assert {chunk.prompt_tokens for chunk in chunks} == {len("user: hi\n")}
    assert [chunk.output_tokens for chunk in chunks] == sorted(c.output_tokens for c in chunks)
    assert chunks[-1] == Chunk("", 8, 9, "stop")  # seven bytes and the token of the end
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert engine.submitted[0].params.temperature == 0
    assert engine.options == [{"request_id": "chat-0", "fill_context": True}]


def test_a_conversation_with_the_engine() -> None:
    engine = FakeAsyncEngine(lambda ids, choice: answer(f"{len(ids)}"))
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    said = talk(backend, "hi", "yo", "/stats", "/params", "x" * 100, system="S")
    backend.close()
    assert said.startswith("19\n42\nconversation  45 of 100 tokens\n")
    assert "temperature                1.0 (default)\n" in said
    assert said.endswith("error: the prompt has 163 tokens; /reset begins anew\n")


class Watched(FakeAsyncEngine):
    """Tells of aborts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.was_aborted = threading.Event()
        self.was_closed = False

    def _abort(self, generation: Generation) -> None:
        super()._abort(generation)
        self.was_aborted.set()

    async def close(self) -> None:
        self.was_closed = True


def test_a_stream_closed_in_the_middle_aborts_its_request() -> None:
    engine = Watched(lambda ids, choice: [Step("a", (97,)), Step("b", (98,))], manual=True)
    submit = engine.submit

    def one_step(*arguments: object, **options: object) -> list[Generation]:
        asyncio.get_running_loop().call_soon(engine.step)
        return submit(*arguments, **options)  # type: ignore[arg-type]

    engine.submit = one_step  # type: ignore[method-assign]
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    stream = backend.stream(HI, SamplingParams())
    assert next(stream).text == "a"
    assert not engine.was_aborted.is_set()
    stream.close()
    assert engine.was_aborted.wait(LIMIT_S)
    backend.close()
    assert (engine.aborted, engine.was_closed) == (["chat-0"], True)


def test_ctrl_c_before_the_first_token_aborts_the_request() -> None:
    engine = Watched(manual=True)
    submit = engine.submit

    def pressed(*arguments: object, **options: object) -> list[Generation]:
        asyncio.get_running_loop().call_soon(press_ctrl_c)
        return submit(*arguments, **options)  # type: ignore[arg-type]

    engine.submit = pressed  # type: ignore[method-assign]
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    with heeding_ctrl_c():
        assert "[stopped before the answer began" in talk(backend, "hi")
    assert engine.was_aborted.wait(LIMIT_S)
    backend.close()
    assert engine.aborted == ["chat-0"]


def test_what_the_model_refuses_is_refused_before_the_first_prompt() -> None:
    engine = FakeAsyncEngine()
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"vocabulary of {VOCAB_SIZE}"):
        talk(backend, "never read", params=SamplingParams(stop_token_ids=[VOCAB_SIZE]))
    engine.template_error = ChatTemplateError("no chat template", "messages")
    with pytest.raises(ChatTemplateError):
        talk(backend, "never read")
    backend.close()


def test_a_dead_engine_ends_the_chat() -> None:
    engine = FakeAsyncEngine()
    backend = EngineBackend(engine)  # type: ignore[arg-type]
    engine.error = EngineDeadError("the scheduler was killed")
    with pytest.raises(EngineDeadError, match="was killed"):
        talk(backend, "hi")
    backend.close()


class Unstartable(Watched):
    """Fails to start, or starts for ever if there is nothing to raise."""

    start_error: Exception | None = None
    cleaned = False

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        asyncio.get_running_loop().call_soon(press_ctrl_c)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned = True


def test_an_engine_that_does_not_start_is_closed() -> None:
    engine = Unstartable()
    engine.start_error = ConfigError("too large")
    with pytest.raises(ConfigError, match="too large"):
        EngineBackend(engine)  # type: ignore[arg-type]
    assert engine.was_closed


def test_ctrl_c_while_the_engine_starts_lets_it_clean_up() -> None:
    engine = Unstartable()
    with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
        EngineBackend(engine)  # type: ignore[arg-type]
    assert engine.cleaned
    assert engine.was_closed
