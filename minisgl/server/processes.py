"""The processes behind an `AsyncEngine`: started, listened to, watched, ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from minisgl.errors import EngineDeadError
from minisgl.message import (
    Answer,
    Deltas,
    EngineReady,
    Flushed,
    Refusal,
    StartFailed,
    StepDone,
    TextReady,
    ToFront,
    ToScheduler,
)
from minisgl.scheduler.worker import WorkerSpec
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.renderer import TemplateRenderer
from minisgl.utils.logger import get_logger
from minisgl.utils.mp import Child, Receiver, Sender, how_ended, make_socket_folder, remove_folder

from .text import ProcessText, ThreadText, error_named
from .text_worker import TextWorkerSpec

__all__ = ["ProcessOptions", "Processes"]

logger = get_logger(__name__)


class ProcessOptions(NamedTuple):
    """How the processes are set up."""

    tokenizer_workers: int
    template_timeout: float
    log_format: str
    trace_steps: bool


class Processes:
    """One scheduler, any number of text workers, and the socket for their messages.

    `deliver` gets each step's deltas, and `die` the error when a process ends that should not.
    All of it belongs to one event loop's thread.
    """

    def __init__(
        self,
        model_path: str,
        tokenizer: Tokenizer | None,
        config: dict[str, Any],
        options: ProcessOptions,
        deliver: Callable[[Deltas], None],
        die: Callable[[EngineDeadError], None],
    ) -> None:
        self.on_flushed: Callable[[Flushed], None] = lambda message: None
        self.is_ready = False
        self._deliver = deliver
        self._die = die
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[EngineReady] = self._loop.create_future()
        self._engine_ready: EngineReady | None = None
        self._num_starting = 1 + options.tokenizer_workers
        self._closer: asyncio.Future[None] | None = None
        self._children: list[Child] = []
        self._renderer: TemplateRenderer | None = None
        folder = os.path.abspath(model_path)  # the children are elsewhere
        self._folder = make_socket_folder()
        front, scheduler = self._address("front"), self._address("scheduler")
        self._receiver: Receiver[ToFront] = Receiver(front, ToFront)
        self.scheduler: Sender[ToScheduler] = Sender(scheduler)
        self.text: ThreadText | ProcessText
        log = (logging.getLevelName(logger.getEffectiveLevel()), options.log_format)
        routes = [front]
        if options.tokenizer_workers:
            routes = [self._address(f"text{i}") for i in range(options.tokenizer_workers)]
            self.text = ProcessText([Sender(address) for address in routes])
        else:
            if tokenizer is not None:
                self._renderer = TemplateRenderer(cpu_limit_s=options.template_timeout)
                tokenizer.render_with(self._renderer)
            self.text = ThreadText(tokenizer, self.scheduler)
        self._specs: list[tuple[str, Any]] = [
            (
                "minisgl.scheduler.worker",
                WorkerSpec(folder, config, scheduler, front, routes, *log, options.trace_steps),
            )
        ]
        for i in range(options.tokenizer_workers):
            spec = TextWorkerSpec(
                i, folder, options.template_timeout, routes[i], front, scheduler, *log
            )
            self._specs.append(("minisgl.server.text_worker", spec))

    def _address(self, name: str) -> str:
        return os.path.join(self._folder, name)

    async def start(self) -> EngineReady:
        """Start them all; raises what kept one from starting."""
        self._loop.add_reader(self._receiver.fileno(), self._receive)
        for module, spec in self._specs:
            await asyncio.to_thread(self._spawn, module, spec)
        ready = await self._started
        self.is_ready = True
        return ready

    def _spawn(self, module: str, spec: Any) -> None:
        child = Child(module, spec, self._exited)
        self._children.append(child)
        if self._closer is not None:  # it was closed meanwhile, and may not have seen this one
            child.stop()

    async def close(self) -> None:
        """End them all and remove what they left; any number of times."""
        if self._closer is None:
            self._closer = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        if not self._started.done():
            self._fail_start(EngineDeadError("the engine was closed before it had started"))
            self._started.exception()  # whether or not `start` waits for it
        self.text.close()
        await asyncio.gather(*(asyncio.to_thread(child.stop) for child in self._children))
        self._loop.remove_reader(self._receiver.fileno())
        self._receiver.close()
        self.scheduler.close()
        if self._renderer is not None:
            await asyncio.to_thread(self._renderer.close)
        remove_folder(self._folder)

    def _exited(self, child: Child, code: int) -> None:
        """In the thread that waits for the child."""
        try:
            self._loop.call_soon_threadsafe(self._child_ended, child, code)
        except RuntimeError:  # the loop is closed: there is nobody to tell
            logger.debug("The event loop ended before the engine was closed")

    # -- messages ----------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take what came. Here and not in a thread: it is little, and a token has one wait less."""
        try:
            for message in self._receiver.receive(wait=False):
                self._take(message)
        except Exception as error:  # a fault of ours; those whose messages it lost would wait on
            logger.exception("A message could not be taken")
            self._die(EngineDeadError(f"the front failed: {type(error).__name__}: {error}"))

    def _take(self, message: ToFront) -> None:
        if isinstance(message, StepDone):
            assert isinstance(self.text, ThreadText)
            self._deliver(self.text.on_step(message))
        elif isinstance(message, Deltas):
            self._deliver(message)
        elif isinstance(message, (Answer, Refusal)):
            assert isinstance(self.text, ProcessText)
            self.text.on_answer(message)
        elif isinstance(message, Flushed):
            self.on_flushed(message)
        elif isinstance(message, StartFailed):
            if not self._started.done():
                kind, why = message.kind, message.message
                self._started.set_exception(
                    error_named(kind, why) or EngineDeadError(f"{kind}: {why}")
                )
        elif isinstance(message, (EngineReady, TextReady)):
            if isinstance(message, EngineReady):
                self._engine_ready = message
            self._num_starting -= 1
            if self._num_starting == 0 and not self._started.done():
                assert self._engine_ready is not None
                self._started.set_result(self._engine_ready)

    def _child_ended(self, child: Child, code: int) -> None:
        if self._closer is not None:
            return
        error = EngineDeadError(f"the process {child.module} (pid {child.pid}) {how_ended(code)}")
        if not self.is_ready:
            # Its own message says more and may still be on the way.
            self._loop.call_later(0.5, self._fail_start, error)
        else:
            logger.error("%s", error)
            self.text.fail(error)
            self._die(error)

    def _fail_start(self, error: EngineDeadError) -> None:
        if not self._started.done():
            self._started.set_exception(error)
