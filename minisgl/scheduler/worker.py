"""The process that owns the model: messages in, steps, messages out.

    while there is work:  take what messages came ─> step ─> send what it changed
    otherwise:            wait for a message

Run as `python -m minisgl.scheduler.worker` by `minisgl.server`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from minisgl.config import EngineConfig
from minisgl.core import Req
from minisgl.errors import EngineDeadError, MinisglError
from minisgl.message import (
    Abort,
    EngineReady,
    EngineStats,
    Flush,
    Flushed,
    FromScheduler,
    RequestStart,
    StartFailed,
    StepDone,
    Submit,
    TokenUpdate,
    ToScheduler,
    make_reqs,
)
from minisgl.models import load_model_info
from minisgl.utils.logger import configure_logging, get_logger
from minisgl.utils.mp import (
    Receiver,
    Sender,
    exit_with_parent,
    freeze_heap,
    read_spec,
)

from .build import Built, build_scheduler
from .recorder import StepRecorder
from .scheduler import Scheduler, Update

__all__ = ["SchedulerWorker", "WorkerSpec", "main"]

logger = get_logger(__name__)

MAX_FAILED_STEPS = 12
"""So many in a row, none in between that succeeded, and the device is taken to be broken."""


class WorkerSpec(msgspec.Struct):
    """What the process is told when it starts."""

    model_path: str
    config: dict[str, Any]
    """Fields of `EngineConfig`."""
    address: str
    """Where it receives `ToScheduler` messages."""
    front: str
    """Where `EngineReady`, `StartFailed` and `Flushed` go."""
    routes: list[str]
    """Where the `StepDone` of each text worker go."""
    log_level: str = "WARNING"
    log_format: str = "text"
    trace_steps: bool = False
    """Tell when each step was computed."""


class _Live:
    """A sequence that has not ended, as far as its messages are concerned."""

    __slots__ = ("received_s", "req", "route")

    def __init__(self, req: Req, route: int, received_s: float) -> None:
        self.req = req
        self.route = route
        self.received_s = received_s


class SchedulerWorker:
    """Connects a scheduler to its sockets; knows nothing of models or text."""

    def __init__(
        self,
        scheduler: Scheduler,
        receiver: Receiver[ToScheduler],
        front: Sender[FromScheduler],
        routes: list[Sender[FromScheduler]],
    ) -> None:
        self._scheduler = scheduler
        self._receiver = receiver
        self._front = front
        self._routes = routes
        self._live: dict[int, _Live] = {}
        self._num_failed_steps = 0

    def run(self) -> NoReturn:
        """Serve for ever; raises what the device raises when it fails for good."""
        while True:
            for message in self._receiver.receive(wait=not self._scheduler.has_work):
                self._guarded(self._take, message)
            if self._scheduler.has_work:
                self._guarded(self._step)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it; what fails in it ends no other request, unless everything fails."""
        try:
            function(*arguments)
        except EngineDeadError:  # another rank is gone
            raise
        except Exception:
            self._num_failed_steps += 1
            logger.exception("A step failed")
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise

    def _take(self, message: ToScheduler) -> None:
        if isinstance(message, Submit):
            now = time.monotonic()
            for req in make_reqs(message):
                try:
                    self._scheduler.add(req)
                except ValueError:  # the front checked it: a fault of ours, but only its own end
                    logger.exception("%r was not taken", req)
                    ended = TokenUpdate(req.uid, finish_reason="error")
                    self._routes[message.route].send(StepDone([ended], self._stats(now)))
                else:
                    self._live[req.uid] = _Live(req, message.route, now)
        elif isinstance(message, Abort):
            for uid in message.uids:
                self._scheduler.abort(uid, message.reason)
        elif isinstance(message, Flush):
            self._front.send(Flushed(message.ticket, self._scheduler.flush_cache()))

    def _step(self) -> None:
        start = time.monotonic()
        updates = self._scheduler.step()  # what ends by a failing one is told by the next
        self._num_failed_steps = 0
        self._deliver(updates, self._stats(start))

    def _deliver(self, updates: list[Update], stats: EngineStats) -> None:
        """Send each text worker its part; the first one gets the stats in any case."""
        recorder = self._scheduler.recorder
        parts: list[list[TokenUpdate]] = [[] for _ in self._routes]
        for update in updates:
            live = self._live[update.uid]
            parts[live.route].append(self._message(update, live, stats.time_s))
            if update.finish_reason is not None:
                del self._live[update.uid]
        for index, part in enumerate(parts):
            if part or index == 0:
                steps = recorder.take() if recorder is not None and index == 0 else []
                self._routes[index].send(StepDone(part, stats, steps))

    def _message(self, update: Update, live: _Live, now: float) -> TokenUpdate:
        req, start = live.req, None
        if update.token_id is not None and req.num_output == 1:
            start = RequestStart(req.num_cached_tokens, live.received_s, req.started_s, now)
        return TokenUpdate(
            update.uid,
            update.token_id,
            update.finish_reason,
            update.logprobs,
            update.prompt_logprobs,
            start,
        )

    def _stats(self, start: float) -> EngineStats:
        scheduler, now = self._scheduler, time.monotonic()
        counts = scheduler.stats
        return EngineStats(
            time_s=now,
            step_s=now - start,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_pages=scheduler.num_pages,
            num_used_pages=scheduler.num_used_pages,
            num_steps=counts.num_steps,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_decode_tokens=counts.num_decode_tokens,
            num_queried_tokens=counts.num_queried_tokens,
            num_hit_tokens=counts.num_hit_tokens,
            num_retractions=counts.num_retractions,
        )


def _ready(built: Built) -> EngineReady:
    plan, config = built.engine.plan, built.config
    return EngineReady(
        max_model_len=plan.max_model_len,
        max_running_requests=config.max_running_requests,
        capacity_tokens=plan.num_pages * config.page_size,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        device=str(config.device),
        dtype=str(config.dtype).removeprefix("torch."),
        threads=config.threads,
    )


def main() -> int:
    """The process's life: ends with its parent, or returns the exit code of a failed start."""
    spec = read_spec(WorkerSpec)
    exit_with_parent(os.path.dirname(spec.address))
    configure_logging(spec.log_level, spec.log_format)
    front: Sender[FromScheduler] = Sender(spec.front)
    try:
        info = load_model_info(spec.model_path)
        built = build_scheduler(spec.model_path, info, EngineConfig(**spec.config))
        receiver: Receiver[ToScheduler] = Receiver(spec.address, ToScheduler)
    except Exception as error:
        if not isinstance(error, MinisglError):
            logger.exception("The engine did not start")
        front.send(StartFailed(type(error).__name__, str(error)))
        front.close()
        return 2 if isinstance(error, MinisglError) else 1
    routes: list[Sender[FromScheduler]] = [Sender(address) for address in spec.routes]
    if spec.trace_steps:
        built.scheduler.recorder = StepRecorder.of(built.engine)
    freeze_heap()
    front.send(_ready(built))
    if built.ranks is not None:
        # From wherever it is noticed first: a step may wait for a dead rank for long.
        built.ranks.on_death(lambda: _end(built))
    try:
        SchedulerWorker(built.scheduler, receiver, front, routes).run()
    except EngineDeadError:  # another rank's end, which was logged
        _end(built)


def _end(built: Built) -> NoReturn:
    """End this process and the other ranks' at once, whatever they wait for."""
    if built.ranks is not None:
        built.ranks.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
