"""The engine's text side: prompts to ids, steps to text. In threads, or in processes.

Both ways answer the same calls. A request goes to the scheduler, and its end is asked for, by the
one path that also knows its sequences, so that neither can overtake the other:

    ThreadText    AsyncEngine ──────────────────────────> scheduler ──> AsyncEngine
    ProcessText   AsyncEngine ──> worker uid_i ─────────> scheduler ──> the same worker ──> ...
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from minisgl import errors
from minisgl.errors import (
    ChatTemplateError,
    EngineDeadError,
    InvalidRequestError,
    MinisglError,
    RequestFailedError,
)
from minisgl.message import (
    Abort,
    Answer,
    Decode,
    Deltas,
    Encode,
    EncodeChat,
    Refusal,
    StepDone,
    Submit,
    ToScheduler,
    ToTextWorker,
)
from minisgl.tokenizer import Tokenizer
from minisgl.utils.mp import Sender

from .tracker import SequenceTracker

__all__ = ["ProcessText", "TextSide", "TextThreads", "ThreadText", "answer", "error_named"]

T = TypeVar("T")
Question = Encode | EncodeChat | Decode

LONG_TEXT = 1 << 16
"""Characters, about. Longer ones have a thread of their own: short ones needn't wait."""


class TextSide(Protocol):
    """What `AsyncEngine` needs of it."""

    async def ask(self, question: Question) -> Answer:
        """Tokenize or detokenize; raises `InvalidRequestError` for what can't be."""
        ...

    def submit(self, message: Submit) -> None:
        """Follow the sequences of a prompt and pass it on to the scheduler."""
        ...

    def abort(self, message: Abort) -> None:
        """Pass it on to the scheduler; the sequences are all of one prompt."""
        ...

    def fail(self, error: EngineDeadError) -> None:
        """Nobody may be there any more to answer the open questions: they raise this."""
        ...

    def close(self) -> None:
        """Take no more questions; those that are open are answered, or raise."""
        ...


def answer(tokenizer: Tokenizer | None, question: Question) -> Answer:
    """Do what a question asks for, in the calling thread."""
    if tokenizer is None:
        what = "messages" if isinstance(question, EncodeChat) else "text"
        raise InvalidRequestError(
            f"the model has no tokenizer and takes no {what}: send token ids", param="prompt"
        )
    if isinstance(question, Encode):
        ids = tokenizer.encode(question.text, add_special_tokens=question.add_special_tokens)
        return Answer(question.ticket, ids)
    if isinstance(question, Decode):
        text = tokenizer.decode(
            question.token_ids, skip_special_tokens=question.skip_special_tokens
        )
        return Answer(question.ticket, text=text)
    ids = tokenizer.encode_chat(
        question.messages,
        add_generation_prompt=question.add_generation_prompt,
        continue_final_message=question.continue_final_message,
        tools=question.tools,
        **_checked(question.template_kwargs),
    )
    return Answer(question.ticket, ids)


def _checked(template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    from minisgl.tokenizer import check_template_kwargs

    check_template_kwargs(template_kwargs or {})
    return template_kwargs or {}


def _check_chat(question: EncodeChat) -> None:
    """Raise `ChatTemplateError` for what the other side would not take as this type."""
    try:
        for dicts in (question.messages, question.tools):
            msgspec.convert(dicts, list[dict[str, Any]] | None)
        msgspec.convert(question.template_kwargs, dict[str, Any] | None)
    except msgspec.ValidationError as error:
        raise ChatTemplateError(f"not plain JSON data: {error}", "messages") from error


def error_named(kind: str, message: str, param: str | None = None) -> MinisglError | None:
    """An error of `minisgl.errors` by the name it had in another process; None if it is no such."""
    cls: type[MinisglError] | None = getattr(errors, kind) if kind in errors.__all__ else None
    if cls is None:
        return None
    return cls(message, param) if issubclass(cls, InvalidRequestError) else cls(message)


def _is_long(question: Question) -> bool:
    """Whether there is more than `LONG_TEXT` of it; takes no longer to tell if it is huge."""
    if isinstance(question, Encode):
        return len(question.text) > LONG_TEXT
    if isinstance(question, Decode):
        return len(question.token_ids) > LONG_TEXT
    length, waiting = 0, [question.messages, question.tools, question.template_kwargs]
    while waiting and length <= LONG_TEXT:
        item: Any = waiting.pop()
        length += len(item) if isinstance(item, (str, list, dict)) else 1
        if isinstance(item, (list, dict)) and length <= LONG_TEXT:
            waiting += item.values() if isinstance(item, dict) else item
    return length > LONG_TEXT


class TextThreads:
    """Threads that answer questions: whoever must wait for a slow template or a long text keeps
    only others of the kind waiting. While they tokenize, they don't hold Python's lock."""

    def __init__(self) -> None:
        self._texts = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._chats = ThreadPoolExecutor(2, thread_name_prefix="chat")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long text")

    def of(self, question: Question) -> ThreadPoolExecutor:
        """Those that the question is for."""
        if _is_long(question):
            return self._long
        return self._chats if isinstance(question, EncodeChat) else self._texts

    def close(self) -> None:
        """Take no more questions; those that are there are answered."""
        # Not cancelled: that would look to those who wait as if they had been.
        for threads in (self._texts, self._chats, self._long):
            threads.shutdown(wait=False)


class ThreadText:
    """Does it in a few threads of this process."""

    def __init__(self, tokenizer: Tokenizer | None, scheduler: Sender[ToScheduler]) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._tracker = SequenceTracker(
            tokenizer, lambda uids: scheduler.send(Abort(uids, reason="stop"))
        )
        self._threads = TextThreads()

    async def ask(self, question: Question) -> Answer:
        """See `TextSide`."""
        threads = self._threads.of(question)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, answer, self._tokenizer, question)

    def submit(self, message: Submit) -> None:
        """See `TextSide`."""
        self._tracker.open(message)
        try:
            self._scheduler.send(message)
        except BaseException:
            self._tracker.drop(message)
            raise

    def abort(self, message: Abort) -> None:
        """See `TextSide`."""
        self._scheduler.send(message)

    def on_step(self, message: StepDone) -> Deltas:
        """A step as text, in the event loop: a few microseconds a token."""
        return Deltas(self._tracker.push(message.updates), message.stats, message.steps)

    def fail(self, error: EngineDeadError) -> None:
        """See `TextSide`: the threads are there and answer."""

    def close(self) -> None:
        """See `TextSide`."""
        self._threads.close()


class ProcessText:
    """Spreads the work over text workers; a prompt's sequences all belong to one of them."""

    def __init__(self, workers: list[Sender[ToTextWorker]]) -> None:
        self._workers = workers
        self._tickets = itertools.count()
        self._open: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, question: Question) -> Answer:
        """See `TextSide`."""
        if isinstance(question, EncodeChat):
            _check_chat(question)
        ticket = question.ticket = next(self._tickets)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[ticket] = future
        try:
            self._workers[ticket % len(self._workers)].send(question)
            return await future
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text has a lone surrogate at position {error.start}: that is no character; "
                "remove it"
            ) from error
        except (OverflowError, TypeError, RecursionError) as error:
            raise ChatTemplateError(f"not plain JSON data: {error}", "messages") from error
        finally:
            del self._open[ticket]

    def on_answer(self, message: Answer | Refusal) -> None:
        """Give an answer to whoever waits for it."""
        future = self._open.get(message.ticket)
        if future is None or future.done():  # its caller went away
            return
        if isinstance(message, Answer):
            future.set_result(message)
        else:
            error = error_named(message.kind, message.message, message.param)
            future.set_exception(error or RequestFailedError("a text failed; the log says why"))

    def submit(self, message: Submit) -> None:
        """See `TextSide`."""
        message.route = message.first_uid % len(self._workers)
        self._workers[message.route].send(message)

    def abort(self, message: Abort) -> None:
        """See `TextSide`."""
        # By way of the worker that passes on the prompt, or that would overtake it.
        self._workers[message.uids[0] % len(self._workers)].send(message)

    def fail(self, error: EngineDeadError) -> None:
        """See `TextSide`."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """See `TextSide`."""
        self.fail(EngineDeadError("the engine was closed"))
        for worker in self._workers:
            worker.close()
