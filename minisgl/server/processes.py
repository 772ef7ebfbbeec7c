"""The processes behind an `AsyncEngine`: started, listened to, watched, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
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
from minisgl.utils.mp import Child, Receiver, Sender, make_socket_folder, remove_folder

from .text import ProcessText, ThreadText, error_named
from .text_worker import TextWorkerSpec

__all__ = ["ProcessOptions", "Processes"]

logger = get_logger(__name__)


class ProcessOptions(NamedTuple):
    """How the processes are set up."""

    tokenizer_workers: int
    template_timeout: float
    log_format: str


class Processes:
    """One scheduler, any number of text workers, and the thread that receives their messages.

    `deliver` gets each step's deltas, and `die` the error when a process ends that should not;
    both in the event loop's thread, like every other call.
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
        self._closing = False
        self._children: list[Child] = []
        self._renderer: TemplateRenderer | None = None
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
                WorkerSpec(model_path, config, scheduler, front, routes, *log),
            )
        ]
        for i in range(options.tokenizer_workers):
            spec = TextWorkerSpec(
                i, model_path, options.template_timeout, routes[i], front, scheduler, *log
            )
            self._specs.append(("minisgl.server.text_worker", spec))
        self._thread = threading.Thread(target=self._receive, name="receive", daemon=True)

    def _address(self, name: str) -> str:
        return os.path.join(self._folder, name)

    async def start(self) -> EngineReady:
        """Start them all; raises what kept one from starting."""
        self._thread.start()
        for module, spec in self._specs:
            self._children.append(await asyncio.to_thread(Child, module, spec, self._exited))
        ready = await self._started
        self.is_ready = True
        return ready

    async def close(self) -> None:
        """End them all and remove what they left; any number of times."""
        if self._closing:
            return
        self._closing = True
        self.text.close()
        await asyncio.gather(*(asyncio.to_thread(child.stop) for child in self._children))
        if self._thread.is_alive():
            self._receiver.stop()
            await asyncio.to_thread(self._thread.join)
        self._receiver.close()
        self.scheduler.close()
        if self._renderer is not None:
            await asyncio.to_thread(self._renderer.close)
        remove_folder(self._folder)

    # -- in the receiving thread -------------------------------------------------------------

    def _receive(self) -> None:
        while not self._receiver.stopped:
            for message in self._receiver.receive(wait=True):
                if isinstance(message, StepDone):
                    assert isinstance(self.text, ThreadText)
                    message = self.text.on_step(message)
                self._call(self._take, message)

    def _exited(self, child: Child, code: int) -> None:
        self._call(self._child_ended, child, code)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it called in the event loop's thread."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: there is nobody to tell
            logger.debug("The event loop ended before the engine was closed")

    # -- in the event loop's thread ----------------------------------------------------------

    def _take(self, message: ToFront) -> None:
        if isinstance(message, Deltas):
            self._deliver(message)
        elif isinstance(message, (Answer, Refusal)):
            assert isinstance(self.text, ProcessText)
            self.text.on_answer(message)
        elif isinstance(message, Flushed):
            self.on_flushed(message)
        elif isinstance(message, StartFailed):
            if not self._started.done():
                self._started.set_exception(error_named(message.kind, message.message))
        elif isinstance(message, (EngineReady, TextReady)):
            if isinstance(message, EngineReady):
                self._engine_ready = message
            self._num_starting -= 1
            if self._num_starting == 0 and not self._started.done():
                assert self._engine_ready is not None
                self._started.set_result(self._engine_ready)

    def _child_ended(self, child: Child, code: int) -> None:
        if self._closing:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        error = EngineDeadError(f"the process {child.module} (pid {child.pid}) {how}")
        if not self.is_ready:
            # Its own message says more and may still be on the way.
            self._loop.call_later(0.5, self._fail_start, error)
        else:
            logger.error("%s", error)
            self._die(error)

    def _fail_start(self, error: EngineDeadError) -> None:
        if not self._started.done():
            self._started.set_exception(error)
