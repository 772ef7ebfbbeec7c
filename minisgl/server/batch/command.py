"""`run_batch`: a batch from its files to its exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import uvloop

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, EngineDeadError

from ..async_engine import AsyncEngine
from ..config import ServerConfig
from ..context import ServerContext, ServerState
from ..metrics import Metrics
from .output import OutputFile
from .progress import Progress
from .runner import BatchRunner

__all__ = ["BatchJob", "run_batch"]

UNLIMITED = sys.maxsize
"""Sequences that may queue. The lines at a time are limited instead, so none is ever refused."""
AGAIN = "the same command goes on from here"


class BatchJob(NamedTuple):
    """The files of a batch."""

    input: str
    """`-` is stdin."""
    output: str
    concurrency: int | None = None
    """Lines at a time; None: twice the requests that the engine runs at a time."""


def run_batch(model: str, config: EngineConfig, options: ServerConfig, job: BatchJob) -> int:
    """Answer a batch; returns the exit code.

    0: all lines succeeded, now or in an earlier run; 1: some failed, or the engine died;
    128 + its number: a signal, SIGINT or SIGTERM, ended it. Raises `ConfigError` or another
    `MinisglError` if it can't start.
    """
    with ExitStack() as files:
        source = files.enter_context(_open_input(job))
        output = files.enter_context(OutputFile(job.output))
        engine = AsyncEngine(
            model,
            tokenizer_workers=options.tokenizer_workers,
            template_timeout=options.template_timeout,
            max_queued_requests=UNLIMITED,
            **vars(config),
        )
        name = options.served_model_name or model
        state = ServerState(loading=False)
        context = ServerContext(engine, options, name, int(time.time()), state, Metrics(name))
        return uvloop.run(_run(context, job, source, output))


async def _run(context: ServerContext, job: BatchJob, source: BinaryIO, output: OutputFile) -> int:
    """Load the model, answer the lines, and end all processes, also when a signal comes."""
    received: list[signal.Signals] = []
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: signal.Signals) -> None:
        if not received:  # a second one would only keep the processes from ending
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        async with context.engine:
            num_failed = await _answer(context, job, source, output)
    except EngineDeadError as error:
        _say(f"error: {error}; {AGAIN}")
        return 1
    except asyncio.CancelledError:
        if not received:
            raise
        _say(f"interrupted; {AGAIN}")
        return 128 + received[0]
    if num_failed:
        _say(f"failed lines say why in {job.output}; the same command tries them again")
    return 1 if num_failed else 0


async def _answer(
    context: ServerContext, job: BatchJob, source: BinaryIO, output: OutputFile
) -> int:
    """Answer the lines, say what was done, however that ends, and return how many failed."""
    output.resume()
    total = None
    if sys.stderr.isatty() and Path(job.input).is_file():  # for a bar that knows its end
        total = _count_lines(job.input)
    progress = Progress(total, len(output.done))
    context.engine.observers.append(progress)
    concurrency = job.concurrency or 2 * context.engine.ready.max_running_requests
    try:
        with progress:
            await BatchRunner(context, output, progress).run(source, concurrency)
    finally:
        print(progress.summary(), file=sys.stderr, flush=True)
    return progress.num_failed


def _open_input(job: BatchJob) -> BinaryIO:
    try:
        if job.input == "-":
            return open(0, "rb", buffering=0, closefd=False)
        source = open(job.input, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--input {job.input}: {error.strerror}") from error
    output = Path(job.output)
    if output.exists() and output.samefile(job.input):
        source.close()
        raise ConfigError(f"--output {job.output} is the input: name another file")
    return source


def _count_lines(path: str) -> int:
    """Blank ones too, which is near enough for a bar."""
    with open(path, "rb", buffering=0) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _say(message: str) -> None:
    print(f"minisgl batch: {message}", file=sys.stderr, flush=True)
