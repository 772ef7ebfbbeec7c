"""The process of a text worker: tokenizes prompts, turns steps into text.

Run as `python -m minisgl.server.text_worker` when `--tokenizer-workers` is not 0.
"""

from __future__ import annotations

import os
import sys

import msgspec

from minisgl.errors import MinisglError
from minisgl.llm.requests import load_tokenizer
from minisgl.message import (
    Abort,
    Deltas,
    Refusal,
    StartFailed,
    StepDone,
    Submit,
    TextReady,
    ToFront,
    ToScheduler,
    ToTextWorker,
)
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.renderer import TemplateRenderer
from minisgl.utils.logger import configure_logging, get_logger
from minisgl.utils.mp import Receiver, Sender, exit_with_parent, read_spec

from .text import Question, TextThreads, answer
from .tracker import SequenceTracker

__all__ = ["TextWorkerSpec", "main"]

logger = get_logger(__name__)


class TextWorkerSpec(msgspec.Struct):
    """What the process is told when it starts."""

    index: int
    model_path: str
    template_timeout: float
    address: str
    """Where it receives `ToTextWorker` messages."""
    front: str
    scheduler: str
    log_level: str = "WARNING"
    log_format: str = "text"


class _TextWorker:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        front: Sender[ToFront],
        scheduler: Sender[ToScheduler],
    ) -> None:
        self._tokenizer = tokenizer
        self._front = front
        self._scheduler = scheduler
        self._tracker = SequenceTracker(
            tokenizer, lambda uids: scheduler.send(Abort(uids, reason="stop"))
        )
        self._threads = TextThreads()  # tokens to show don't wait for them

    def take(self, message: ToTextWorker) -> None:
        """Do what one message asks for."""
        if isinstance(message, StepDone):
            deltas = self._tracker.push(message.updates)
            self._front.send(Deltas(deltas, message.stats, message.steps))
        elif isinstance(message, Submit):
            self._tracker.open(message)
            self._scheduler.send(message)
        elif isinstance(message, Abort):
            self._scheduler.send(message)
        else:
            self._threads.of(message).submit(self._answer, message)

    def _answer(self, question: Question) -> None:
        try:
            self._front.send(answer(self._tokenizer, question))
        except Exception as error:
            if not isinstance(error, MinisglError):
                logger.exception("A text could not be processed")
            param = getattr(error, "param", None)
            self._front.send(Refusal(question.ticket, type(error).__name__, str(error), param))


def main() -> int:
    """The process's life: ends with its parent, or returns the exit code of a failed start."""
    spec = read_spec(TextWorkerSpec)
    exit_with_parent(os.path.dirname(spec.address))
    configure_logging(spec.log_level, spec.log_format)
    front: Sender[ToFront] = Sender(spec.front)
    try:
        tokenizer = load_tokenizer(spec.model_path)
        if tokenizer is not None:
            tokenizer.render_with(TemplateRenderer(cpu_limit_s=spec.template_timeout))
        receiver: Receiver[ToTextWorker] = Receiver(spec.address, ToTextWorker)
    except Exception as error:
        front.send(StartFailed(type(error).__name__, str(error)))
        front.close()
        return 2 if isinstance(error, MinisglError) else 1
    worker = _TextWorker(tokenizer, front, Sender(spec.scheduler))
    front.send(TextReady(spec.index))
    while True:
        for message in receiver.receive(wait=True):
            worker.take(message)


if __name__ == "__main__":
    sys.exit(main())
