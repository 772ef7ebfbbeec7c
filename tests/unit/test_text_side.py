"""The engine's text side: tokens to text, and questions that threads or processes answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from minisgl.core import SamplingParams
from minisgl.errors import (
    BusyError,
    ChatTemplateError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
)
from minisgl.message import (
    Abort,
    Answer,
    Decode,
    Encode,
    EncodeChat,
    EngineStats,
    Refusal,
    SequenceDelta,
    StepDone,
    Submit,
    ToFront,
    TokenUpdate,
    ToScheduler,
    ToTextWorker,
)
from minisgl.server.text import LONG_TEXT, ProcessText, TextThreads, ThreadText
from minisgl.server.text_worker import _TextWorker
from minisgl.server.tracker import SequenceTracker
from tests.unit.fake_async_engine import byte_tokenizer


def stats(time_s: float = 1.0) -> EngineStats:
    return EngineStats(time_s, 0.001, 1, 0, 6, 1, 1, 1, 0, 1, 0, 0)


class FakeSender:
    """The scheduler or a text worker, as far as it is sent something."""

    def __init__(self, kind: Any = ToScheduler) -> None:
        self.kind = kind
        self.sent: list[Any] = []
        self.closed = False

    def send(self, message: Any) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=self.kind))

    def close(self) -> None:
        self.closed = True


def submit(uid: int, **params: Any) -> Submit:
    complete = SamplingParams(**params).resolve_defaults({})
    return Submit(uid, [1], complete, 0, [], [])


# -- SequenceTracker: tokens in, deltas out ---------------------------------------------------


class Tracked:
    """A tracker, and the uids that it asked to stop; tokens 0 to 255 are bytes."""

    def __init__(self, *submits: Submit, tokenizer: Any = None) -> None:
        self.stopped: list[list[int]] = []
        self._tracker = SequenceTracker(tokenizer or byte_tokenizer(), self.stopped.append)
        for message in submits:
            self._tracker.open(message)

    def push(self, *updates: TokenUpdate) -> list[SequenceDelta]:
        return self._tracker.push(updates)

    def text(self, uid: int, text: str, end: str | None = None) -> list[SequenceDelta]:
        """Push the bytes of a text, a step each; the last one ends it if `end` is given."""
        *most, last = text.encode()
        deltas = [d for byte in most for d in self.push(TokenUpdate(uid, byte))]
        return deltas + self.push(TokenUpdate(uid, last, end))


def joined(deltas: list[SequenceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_comes_as_its_characters_are_whole() -> None:
    tracked = Tracked(submit(0))
    assert [d.text for d in tracked.text(0, "aé")] == ["a", "", "é"]
    assert tracked.push(TokenUpdate(0, 0xC3))[0].text == ""
    [last] = tracked.push(TokenUpdate(0, finish_reason="abort"))
    assert (last.text, last.token_ids, last.finish_reason) == ("�", [], "abort")


def test_a_stop_string_ends_a_sequence_at_once_and_later_tokens_are_dropped() -> None:
    tracked = Tracked(submit(0, stop="END"), submit(1))
    deltas = tracked.text(0, "some ENDless")
    assert joined(deltas) == "some "
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert sum(len(delta.token_ids) for delta in deltas) == len("some END")
    assert tracked.stopped == [[0]], "the scheduler is told, once"
    assert tracked.push(TokenUpdate(0, 65), TokenUpdate(1, 66))[0].uid == 1
    assert tracked.push(TokenUpdate(0, finish_reason="stop")) == []


def test_a_stop_string_on_the_last_token_needs_no_telling() -> None:
    tracked = Tracked(submit(0, stop="END"))
    last = tracked.text(0, "an END", end="length")[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert tracked.stopped == []


def test_what_might_have_become_a_stop_string_is_told_at_the_end() -> None:
    tracked = Tracked(submit(0, stop="END"))
    assert joined(tracked.text(0, "an EN")) == "an "
    assert joined(tracked.push(TokenUpdate(0, finish_reason="abort"))) == "EN"


def test_several_that_stop_in_one_step_are_told_together() -> None:
    tracked = Tracked(submit(0, stop="A", n=3), submit(3, stop="B"))
    deltas = tracked.push(*(TokenUpdate(uid, 65) for uid in range(4)))
    assert [delta.finish_reason for delta in deltas] == ["stop", "stop", "stop", None]
    assert tracked.stopped == [[0, 1, 2]]


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    tracker = SequenceTracker(None, lambda uids: None)
    tracker.open(submit(0))
    [delta] = tracker.push([TokenUpdate(0, 65, "length")])
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [65], "length")


# -- ThreadText and ProcessText ---------------------------------------------------------------


def thread_text() -> tuple[ThreadText, FakeSender]:
    scheduler: Any = FakeSender()
    return ThreadText(byte_tokenizer(), scheduler), scheduler


def test_threads_answer_questions() -> None:
    async def main() -> None:
        text, _ = thread_text()
        assert (await text.ask(Encode(0, "hi", False))).token_ids == [104, 105]
        assert (await text.ask(Encode(0, "hi" * 50_000, False))).token_ids == [104, 105] * 50_000
        assert (await text.ask(Decode(0, [104, 105], True))).text == "hi"
        with pytest.raises(ChatTemplateError):
            await text.ask(EncodeChat(0, [{"role": "user", "content": "hi"}]))
        text.close()

    asyncio.run(main())


def test_slow_chats_keep_no_texts_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        text, _ = thread_text()
        go_on = threading.Event()
        tokenizer = text._tokenizer
        monkeypatch.setattr(tokenizer, "encode_chat", lambda *_, **__: go_on.wait() and [1])
        chats = [asyncio.ensure_future(text.ask(EncodeChat(0, []))) for _ in range(8)]
        await asyncio.sleep(0)  # they are asked
        try:
            answered = await asyncio.wait_for(text.ask(Encode(0, "hi", False)), 20)
            assert answered.token_ids == [104, 105]
            assert not any(chat.done() for chat in chats)
        finally:
            go_on.set()
        text.close()
        # Also those that had not begun.
        assert [(await chat).token_ids for chat in chats] == [[1]] * 8

    asyncio.run(main())


LONG = "a" * (LONG_TEXT + 1)
LONG_QUESTIONS = {
    "text": Encode(0, LONG, True),
    "ids": Decode(0, [1] * (LONG_TEXT + 1), True),
    "message": EncodeChat(0, [{"role": "user", "content": LONG}]),
    "parts": EncodeChat(0, [{"role": "user", "content": [{"type": "text", "text": LONG}]}]),
    "messages": EncodeChat(0, [{"role": "user", "content": "a"}] * LONG_TEXT),
    "tools": EncodeChat(0, [{}], tools=[{"function": {"description": LONG}}]),
}


@pytest.mark.parametrize("long", LONG_QUESTIONS.values(), ids=LONG_QUESTIONS)
def test_long_questions_keep_no_short_ones_waiting(long: Any) -> None:
    threads = TextThreads()
    short_chat = EncodeChat(0, [{"role": "user", "content": "a" * 1000}])
    short = [Encode(0, "a", True), Decode(0, [1], True), short_chat]
    assert threads.of(long) not in [threads.of(question) for question in short]
    assert threads.of(short_chat) is not threads.of(short[0])
    threads.close()


def test_a_prompt_that_can_not_be_sent_is_not_followed() -> None:
    class Broken(FakeSender):
        def send(self, message: Any) -> None:
            raise OSError("no socket")

    scheduler: Any = Broken()
    text = ThreadText(byte_tokenizer(), scheduler)
    with pytest.raises(OSError, match="no socket"):
        text.submit(submit(0, n=2))
    updates = [TokenUpdate(0, 65), TokenUpdate(1, 65)]
    assert text.on_step(StepDone(updates, stats())).deltas == []
    text.close()


def test_a_worker_keeps_no_short_chat_waiting_for_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, go_on, answered = byte_tokenizer(), threading.Event(), threading.Event()

    def encode_chat(messages: Any, **_: Any) -> list[int]:
        if messages[0]["content"] == LONG:
            go_on.wait()
        return [len(messages[0]["content"])]

    class Front(FakeSender):
        def send(self, message: Any) -> None:
            super().send(message)
            answered.set()

    monkeypatch.setattr(tokenizer, "encode_chat", encode_chat)
    front: Any = Front(ToFront)
    scheduler: Any = FakeSender()
    worker = _TextWorker(tokenizer, front, scheduler)
    try:
        for ticket, content in enumerate([LONG, LONG, LONG, "hi"]):
            worker.take(EncodeChat(ticket, [{"role": "user", "content": content}]))
        assert answered.wait(20)
        assert front.sent == [Answer(3, [2])]
    finally:
        go_on.set()


def test_without_a_tokenizer_text_is_refused() -> None:
    async def main() -> None:
        scheduler: Any = FakeSender()
        text = ThreadText(None, scheduler)
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await text.ask(Encode(0, "hi", False))
        text.close()

    asyncio.run(main())


def test_threads_follow_sequences_and_have_them_stopped() -> None:
    text, scheduler = thread_text()
    message = submit(0, stop="B")
    text.submit(message)
    text.abort(Abort([7]))
    deltas = text.on_step(StepDone([TokenUpdate(0, 65), TokenUpdate(0, 66)], stats()))
    assert joined(deltas.deltas) == "A" and deltas.stats == stats()
    assert scheduler.sent == [message, Abort([7]), Abort([0], "stop")]
    text.close()


def process_text(count: int = 2) -> tuple[ProcessText, list[Any]]:
    workers: list[Any] = [FakeSender(ToTextWorker) for _ in range(count)]
    return ProcessText(workers), workers


async def asked(text: ProcessText, *questions: Any) -> list[asyncio.Future[Answer]]:
    futures = [asyncio.ensure_future(text.ask(question)) for question in questions]
    await asyncio.sleep(0)
    return futures


def test_workers_take_turns_and_answers_find_their_questions() -> None:
    async def main() -> None:
        text, workers = process_text()
        questions = [Encode(0, name, True) for name in "abc"]
        futures = await asked(text, *questions)
        assert [[q.text for q in worker.sent] for worker in workers] == [["a", "c"], ["b"]]
        for question in reversed(questions):
            text.on_answer(Answer(question.ticket, [ord(question.text)]))
        assert [(await future).token_ids for future in futures] == [[97], [98], [99]]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("refusal", "kind", "message"),
    [
        (("InvalidRequestError", "too long", "prompt"), InvalidRequestError, "too long"),
        (("ChatTemplateError", "no", "messages"), ChatTemplateError, "no"),
        (("BusyError", "not now", None), BusyError, "not now"),
        # A fault of ours, and the engine is not dead: nothing of it is told.
        (("KeyError", "/secret/path", None), RequestFailedError, "the log says why"),
        (("SystemExit", "/secret/path", None), RequestFailedError, "the log says why"),
    ],
)
def test_a_refusal_is_raised_as_what_it_was(
    refusal: tuple[str, str, str | None], kind: type[Exception], message: str
) -> None:
    async def main() -> None:
        text, [worker] = process_text(1)
        [future] = await asked(text, Encode(0, "a", True))
        text.on_answer(Refusal(worker.sent[0].ticket, *refusal))
        with pytest.raises(kind, match=message) as caught:
            await future
        assert type(caught.value) is kind
        assert "secret" not in str(caught.value)
        assert getattr(caught.value, "param", None) == refusal[2]

    asyncio.run(main())


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    async def main() -> None:
        text, [worker] = process_text(1)
        [future] = await asked(text, Encode(0, "a", True))
        future.cancel()
        await asyncio.gather(future, return_exceptions=True)
        text.on_answer(Answer(worker.sent[0].ticket, [1]))
        text.on_answer(Refusal(77, "KeyError", "no"))

    asyncio.run(main())


@pytest.mark.parametrize("call", ["fail", "close"])
def test_open_questions_fail_when_nobody_will_answer(call: str) -> None:
    async def main() -> None:
        text, workers = process_text()
        futures = await asked(text, Encode(0, "a", True), Decode(0, [1], True))
        if call == "fail":
            text.fail(EngineDeadError("a worker died"))
        else:
            text.close()
        for future in futures:
            with pytest.raises(EngineDeadError):
                await future
        assert [worker.closed for worker in workers] == [call == "close"] * 2

    asyncio.run(main())


def test_a_prompt_and_its_steps_belong_to_one_worker() -> None:
    text, workers = process_text(3)
    for uid in (0, 1, 5, 7):
        text.submit(submit(uid))
    sent = [[(m.first_uid, m.route) for m in worker.sent] for worker in workers]
    assert sent == [[(0, 0)], [(1, 1), (7, 1)], [(5, 2)]]
    text.abort(Abort([5, 6, 7]))
    assert workers[2].sent[-1] == Abort([5, 6, 7])
    assert [len(worker.sent) for worker in workers] == [1, 2, 2], "no other is told"


NOT_SENT = {
    "half a character": Encode(0, "\ud800", True),
    "half a character in a chat": EncodeChat(0, [{"role": "user", "content": "\ud800"}]),
    "a number too large": EncodeChat(0, [{"role": "user", "content": 2**70}]),
    "an object": EncodeChat(0, [{"role": "user", "content": object()}]),
    "a key that is no string": EncodeChat(0, [{1: "user"}]),  # type: ignore[dict-item]
    "a message that is no object": EncodeChat(0, ["user"]),  # type: ignore[list-item]
    "a variable without name": EncodeChat(0, [{}], template_kwargs={1: 2}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("question", NOT_SENT.values(), ids=NOT_SENT)
def test_what_can_not_be_sent_is_refused(question: Any) -> None:
    async def main() -> None:
        text, [worker] = process_text(1)
        with pytest.raises(InvalidRequestError):
            await asyncio.wait_for(text.ask(question), 5)
        assert worker.sent == []

    asyncio.run(main())
