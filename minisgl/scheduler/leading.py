"""The calls that rank 0 tells the others, and the two who make them.

    rank 0    add, abort, step ...  --commands-->  the others: the same calls in the same order
    all       step: plan alike, compute their shard, all-reduce; tokens are rank 0's

Every decision of a scheduler is a function of the calls made so far, so ranks that make the same
calls take the same ones, and only calls need be told.
"""

from __future__ import annotations

import msgspec

from minisgl.core import Executor, Req
from minisgl.distributed import CommandChannel
from minisgl.kvcache import KVCache
from minisgl.params import SamplingParams

from .planner import Limits
from .ranks import Ranks
from .scheduler import FinishReason, Scheduler, Update

__all__ = ["Follower", "LeadingScheduler"]


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
            list(req.token_ids),
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
        super().add(req)
        self._commands.append(command)

    def abort(self, uid: int, reason: FinishReason = "abort") -> bool:
        """See `Scheduler.abort`."""
        if uid in self._live and not self._is_told:
            self._commands.append(_Abort(uid, reason))
        return super().abort(uid, reason)

    def flush_cache(self) -> int:
        """See `Scheduler.flush_cache`."""
        with self._ranks.alike():
            self._tell(_Flush())
            return super().flush_cache()

    def step(self) -> list[Update]:
        """See `Scheduler.step`; raises `EngineDeadError` when a rank failed: then no step can be
        made any more."""
        # Aborts that came inside the last step are made first thing in this one.
        self._commands += [_Abort(uid, reason) for uid, reason in self._aborts]
        with self._ranks.alike():
            self._tell(_Step())
            self._is_told = True
            try:
                updates = super().step()
            finally:
                self._is_told = False
        if self._ranks.death is not None:  # what an aborted collective left is no token
            raise self._ranks.failure()
        return updates

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
