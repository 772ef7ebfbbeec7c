"""Tensor-parallel ranks: one process each, all with a scheduler and engine of their own.

    rank 0    add, abort, step ...  --commands-->  the others: the same calls in the same order
    all       step: plan alike, compute their shard, all-reduce; tokens are rank 0's

Every decision of a scheduler is a function of the calls made so far, so ranks that make the same
calls take the same ones, and only calls need be told. A rank that fails or dies ends them all: what
it lacks, others wait for in a collective.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from minisgl.config import EngineConfig
from minisgl.core import Executor, Req
from minisgl.distributed import CommandChannel, join_group, leave_group, make_store
from minisgl.errors import ConfigError, EngineDeadError
from minisgl.kvcache import KVCache
from minisgl.params import SamplingParams
from minisgl.utils.logger import get_logger
from minisgl.utils.mp import Child

from .planner import Limits
from .scheduler import FinishReason, Scheduler, Update

__all__ = ["Follower", "LeadingScheduler", "Ranks", "RankSpec"]

logger = get_logger(__name__)

TIMEOUT_S = 120.0
"""For one collective: longer than any step, even where several processes share few CPUs."""


class RankSpec(msgspec.Struct):
    """What a rank's process is told when it starts."""

    rank: int
    size: int
    port: int
    """Of rank 0's store."""
    model_path: str
    config: dict[str, Any]
    """Fields of `EngineConfig`."""
    log_level: str = "WARNING"


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
        """Start them and join their group; raises `EngineDeadError` if one dies meanwhile."""
        if dist.is_initialized():
            raise ConfigError(
                f"--tp {config.tp}: this process has a torch.distributed group already; close the "
                "other engine first"
            )
        self._store = make_store(config.tp)
        self._is_closed = False
        self.death: str | None = None
        self._children = [
            Child(
                "minisgl.scheduler.follower",
                RankSpec(
                    rank,
                    config.tp,
                    self._store.port,
                    os.path.abspath(model_path),
                    vars(config),
                    logging.getLevelName(logger.getEffectiveLevel()),
                ),
                self._exited,
            )
            for rank in range(1, config.tp)
        ]
        try:
            join_group(0, config.tp, self._store, device, TIMEOUT_S)
            self.channel = CommandChannel()
        except BaseException:
            self.close()
            raise

    def _exited(self, child: Child, code: int) -> None:
        if not self._is_closed and self.death is None:
            self.death = f"a tensor-parallel rank (pid {child.pid}) ended with {code}"
            logger.error("%s", self.death)

    def close(self) -> None:
        """End them all; any number of times."""
        if self._is_closed:
            return
        self._is_closed = True
        for child in self._children:
            child.stop()
        leave_group()
        del self._store


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
            why = self._ranks.death or f"{type(error).__name__}: {error}"
            raise EngineDeadError(f"the ranks can't go on: {why}") from error
        finally:
            self._is_told = False

    def _tell(self, last: _Flush | _Step | _Stop) -> None:
        commands, self._commands = [*self._commands, last], []
        if self._ranks.death is not None:
            raise EngineDeadError(f"the ranks can't go on: {self._ranks.death}")
        try:
            self._ranks.channel.send(self._encoder.encode(commands))
        except RuntimeError as error:
            why = self._ranks.death or str(error)
            raise EngineDeadError(f"the ranks can't go on: {why}") from error

    def close(self) -> None:
        """Let the others end."""
        if self._ranks.death is None:
            self._tell(_Stop())
        self._ranks.close()


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
