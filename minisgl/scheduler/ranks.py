"""Tensor-parallel ranks: one process each, all with a scheduler and engine of their own.

    rank 0    add, abort, step ...  --commands-->  the others: the same calls in the same order
    all       step: plan alike, compute their shard, all-reduce; tokens are rank 0's

Every decision of a scheduler is a function of the calls made so far, so ranks that make the same
calls take the same ones, and only calls need be told. A rank that fails or dies ends them all: what
it lacks, others wait for in a collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from minisgl.config import EngineConfig
from minisgl.core import Executor, Req
from minisgl.distributed import (
    CommandChannel,
    DistributedInfo,
    join_group,
    leave_group,
    make_store,
)
from minisgl.errors import ConfigError, EngineDeadError
from minisgl.kvcache import KVCache
from minisgl.params import SamplingParams
from minisgl.utils.logger import LogSettings, get_logger
from minisgl.utils.mp import Child, how_ended

from .planner import Limits
from .scheduler import FinishReason, Scheduler, Update

__all__ = ["Follower", "LeadingScheduler", "Ranks", "RankSpec"]

logger = get_logger(__name__)

TIMEOUT_S = 120.0
"""For one collective: longer than any step, even where several processes share few CPUs."""
GRACE_S = 1.0
"""A rank's end breaks its connections a moment before it is known who it was."""
FAREWELL_S = 5.0
"""For what ranks still have to do at the end."""


class RankSpec(msgspec.Struct):
    """What a rank's process is told when it starts."""

    rank: int
    size: int
    port: int
    """Of rank 0's store."""
    model_path: str
    config: dict[str, Any]
    """Fields of `EngineConfig`."""
    timeout_s: float
    """For one collective."""
    log_level: str
    log_format: str


class _Command(msgspec.Struct, tag=True, array_like=True):
    """A call of the scheduler's."""


class _Add(_Command):
    uid: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    max_len: int
    seed: int
    choice: int
    stop_ids: list[int]
    eos_ids: list[int]
    priority: int
    cache_salt: str | None

    @classmethod
    def of(cls, req: Req) -> _Add:
        return cls(
            req.uid,
            req.token_ids,
            req.prompt_len,
            req.params,
            req.max_len,
            req.seed,
            req.choice,
            sorted(req.stop_ids),
            sorted(req.eos_ids),
            req.priority,
            req.cache_salt,
        )

    def req(self) -> Req:
        return Req(
            uid=self.uid,
            token_ids=self.token_ids,
            prompt_len=self.prompt_len,
            params=self.params,
            max_len=self.max_len,
            seed=self.seed,
            choice=self.choice,
            stop_ids=frozenset(self.stop_ids),
            eos_ids=frozenset(self.eos_ids),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class _Abort(_Command):
    uid: int
    reason: FinishReason


class _Flush(_Command):
    pass


class _Step(_Command):
    pass


class _Stop(_Command):
    pass


_Commands = list[_Add | _Abort | _Flush | _Step | _Stop]


class Ranks:
    """The other ranks' processes, as rank 0 sees them."""

    def __init__(self, model_path: str, config: EngineConfig, device: torch.device) -> None:
        """Start them and join their group; raises `EngineDeadError` if one ends meanwhile."""
        if dist.is_initialized():
            raise ConfigError(
                f"--tp {config.tp}: this process has a torch.distributed group of its own already"
            )
        self.death: str | None = None
        """Why no step can be made any more."""
        self._has_died = threading.Event()
        self._on_death: Callable[[], None] = lambda: None
        self._ended = threading.Semaphore(0)  # once for each that did
        self._is_closed = False
        self._store = make_store(config.tp)
        common = (
            config.tp,
            self._store.port,
            os.path.abspath(model_path),
            vars(config),
            TIMEOUT_S,
            *LogSettings.current(),
        )
        self._children: list[Child] = []
        try:
            for rank in range(1, config.tp):
                spec, exited = RankSpec(rank, *common), partial(self._exited, rank)
                self._children.append(Child("minisgl.scheduler.follower", spec, exited))
            with self.failing_together():
                self.wait_for("here")
                info = DistributedInfo(0, config.tp, config.ep)
                join_group(info, self._store, device, TIMEOUT_S)
                self._channel = CommandChannel(TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def wait_for(self, what: str) -> None:
        """Until each has told `what`; raises `EngineDeadError` if one ends before."""
        keys = [f"{what} {rank}" for rank in range(1, len(self._children) + 1)]
        while not self._store.check(keys):
            if self.death is not None:
                raise self.failure()
            time.sleep(0.01)

    def send(self, commands: bytes) -> None:
        """Tell all of them; raises `EngineDeadError` if that can't be."""
        if self.death is not None:
            raise self.failure()
        try:
            self._channel.send(commands)
        except RuntimeError as error:
            raise self.failure(error) from error

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If another rank's end is what made the start fail, raise that."""
        try:
            yield
        except RuntimeError as error:
            if self._has_died.wait(GRACE_S):
                raise self.failure() from error
            raise

    def failure(self, error: Exception | None = None) -> EngineDeadError:
        """What to raise when `error` came of a step: for good, and naming who ended if one did."""
        if error is not None and not self._has_died.wait(GRACE_S):
            self._die(f"tensor-parallel rank 0 can't go on: {type(error).__name__}: {error}")
        why = self.death or ""
        for rank in range(1, len(self._children) + 1):
            if self._store.check([f"failed {rank}"]):
                why += f"; rank {rank}: {self._store.get(f'failed {rank}').decode()}"
        return EngineDeadError(why)

    def on_death(self, function: Callable[[], None]) -> None:
        """Have it called, in a thread, as soon as a rank has ended that should not."""
        self._on_death = function
        if self.death is not None:
            function()

    def _exited(self, rank: int, child: Child, code: int) -> None:
        """In the thread that waits for the child."""
        self._ended.release()
        if not self._is_closed and self.death is None:
            self._die(f"tensor-parallel rank {rank} (pid {child.pid}) {how_ended(code)}")
            # Not in this thread, for whose end those wait who end all children.
            threading.Thread(target=self._on_death, name="on death", daemon=True).start()

    def _die(self, why: str) -> None:
        self.death = why
        self._has_died.set()
        logger.error("%s", why)

    def close(self, farewell: bytes = b"") -> None:
        """End them all; any number of times. Told `farewell`, they do first what they were told
        before: rank 0's device may wait for their part of it."""
        if self._is_closed:
            return
        self._is_closed = True
        if farewell and self.death is None:
            with suppress(RuntimeError):
                self._channel.send(farewell)
                deadline = time.monotonic() + FAREWELL_S
                for _ in self._children:
                    self._ended.acquire(timeout=max(0, deadline - time.monotonic()))
        self._stop(2.0)
        leave_group()
        del self._store

    def kill(self) -> None:
        """End them all at once; what this process waits for may never come."""
        self._is_closed = True
        self._stop(0.0)

    def _stop(self, timeout_s: float) -> None:
        threads = [
            threading.Thread(target=child.stop, args=(timeout_s,)) for child in self._children
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class LeadingScheduler(Scheduler):
    """Rank 0's scheduler: the others are told of every call before it is made."""

    def __init__(
        self,
        executor: Executor,
        cache: KVCache,
        limits: Limits,
        ranks: Ranks,
        *,
        policy: str = "fcfs",
        overlap: bool = False,
    ) -> None:
        super().__init__(executor, cache, limits, policy=policy, overlap=overlap)
        self._ranks = ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: _Commands = []
        self._is_told = False  # the others know of all that the step being made does

    def add(self, req: Req) -> None:
        """See `Scheduler.add`."""
        command = _Add.of(req)
        command.token_ids = list(req.token_ids)
        super().add(req)
        self._commands.append(command)

    def abort(self, uid: int, reason: FinishReason = "abort") -> bool:
        """See `Scheduler.abort`."""
        if uid in self._live and not self._is_told:
            self._commands.append(_Abort(uid, reason))
        return super().abort(uid, reason)

    def flush_cache(self) -> int:
        """See `Scheduler.flush_cache`."""
        self._tell(_Flush())
        return super().flush_cache()

    def step(self) -> list[Update]:
        """See `Scheduler.step`; raises `EngineDeadError` when a rank failed: then no step can be
        made any more."""
        # Aborts that came inside the last step are made first thing in this one.
        self._commands += [_Abort(uid, reason) for uid, reason in self._aborts]
        self._tell(_Step())
        self._is_told = True
        try:
            return super().step()
        except Exception as error:
            raise self._ranks.failure(error) from error
        finally:
            self._is_told = False

    def _tell(self, last: _Flush | _Step) -> None:
        commands, self._commands = [*self._commands, last], []
        self._ranks.send(self._encoder.encode(commands))

    def close(self) -> None:
        """Let the others end."""
        self._ranks.close(self._encoder.encode([_Stop()]))


class Follower:
    """Another rank: makes the calls that rank 0 tells."""

    def __init__(self, scheduler: Scheduler, channel: CommandChannel) -> None:
        self._scheduler = scheduler
        self._channel = channel
        self._decoder = msgspec.msgpack.Decoder(_Commands)

    def run(self) -> None:
        """Until it is told to stop; raises what a call raises."""
        scheduler = self._scheduler
        while True:
            for command in self._decoder.decode(self._channel.receive()):
                if isinstance(command, _Add):
                    scheduler.add(command.req())
                elif isinstance(command, _Abort):
                    scheduler.abort(command.uid, command.reason)
                elif isinstance(command, _Flush):
                    scheduler.flush_cache()
                elif isinstance(command, _Step):
                    scheduler.step()
                else:
                    return
