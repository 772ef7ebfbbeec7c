"""Tensor-parallel ranks: one process each, all with a scheduler and engine of their own.

    node 0    rank 0   rank 1   rank 2 ...      rank 0's process holds the store where all meet
                  starts ──┴──────┘
    node 1    rank N/2 ...                      started by `other_node.py`, and seen by `nodes.py`

A rank that fails or dies ends them all: what it lacks, others wait for in a collective.
"""

from __future__ import annotations

import math
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

from minisgl.config import EngineConfig, split_address
from minisgl.distributed import (
    CommandChannel,
    DistributedInfo,
    abort_group,
    join_group,
    leave_group,
    make_store,
)
from minisgl.errors import ConfigError, EngineDeadError, MinisglError
from minisgl.utils.logger import LogSettings, get_logger
from minisgl.utils.mp import Child, before_exit, how_ended

from .nodes import JOIN_S, SILENCE_S, Facts, Nodes

__all__ = ["LocalRanks", "RankSpec", "Ranks"]

logger = get_logger(__name__)

TIMEOUT_S = 120.0
"""For one collective: longer than any step, even where several processes share few CPUs."""
GRACE_S = 1.0
"""A rank's end breaks its connections a moment before it is known who it was."""
FAREWELL_S = 5.0
"""For what ranks still have to do at the end."""
LOG_S = 30.0
"""Between two lines about whom rank 0 waits for."""


class RankSpec(msgspec.Struct):
    """What a rank's process is told when it starts."""

    rank: int
    host: str
    """Of rank 0's store."""
    port: int
    model_path: str
    config: dict[str, Any]
    """Fields of `EngineConfig`."""
    timeout_s: float
    """For one collective."""
    log_level: str
    log_format: str


class LocalRanks:
    """The processes of those ranks of one node that this process does not hold itself."""

    def __init__(self, on_exit: Callable[[str, int], None]) -> None:
        """`on_exit` gets each end before `stop`, in words and as an exit code, in a thread."""
        self._on_exit = on_exit
        self._ended = threading.Semaphore(0)  # once for each that did
        self._is_stopping = False
        self._children: list[Child] = []

    def start(
        self, ranks: range, address: tuple[str, int], model_path: str, config: EngineConfig
    ) -> None:
        """Start the processes of these ranks; `address` is that of rank 0's store."""
        where = f" on node {config.node_rank}" if config.nnodes > 1 else ""
        common = (*address, os.path.abspath(model_path), vars(config), TIMEOUT_S)
        for rank in ranks:
            if self._is_stopping:
                return
            spec = RankSpec(rank, *common, *LogSettings.current())
            exited = partial(self._exited, rank, where)
            self._children.append(Child("minisgl.scheduler.follower", spec, exited))

    def _exited(self, rank: int, where: str, child: Child, code: int) -> None:
        """In the thread that waits for the child."""
        self._ended.release()
        if not self._is_stopping:
            who = f"tensor-parallel rank {rank} (pid {child.pid}{where})"
            self._on_exit(f"{who} {how_ended(code)}", code)

    def wait(self, deadline: float) -> bool:
        """Whether all have ended by themselves before it is so late on `time.monotonic`'s clock."""
        for _ in self._children:
            if not self._ended.acquire(timeout=max(0, deadline - time.monotonic())):
                return False
        return True

    def expect_end(self) -> None:
        """From now on an end is no news."""
        self._is_stopping = True

    def stop(self, timeout_s: float) -> None:
        """End them all; who takes longer than `timeout_s` is killed."""
        self.expect_end()
        threads = [
            threading.Thread(target=child.stop, args=(timeout_s,)) for child in self._children
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Ranks:
    """The other ranks, as rank 0 sees them."""

    def __init__(
        self, model_path: str, config: EngineConfig, device: torch.device, facts: Facts
    ) -> None:
        """Start them and join their group; raises `EngineDeadError` if one ends meanwhile.

        With several nodes, those must come with the same `facts` in `nodes.JOIN_S` seconds.
        """
        if dist.is_initialized():
            raise ConfigError(
                f"--tp {config.tp}: this process has a torch.distributed group of its own already"
            )
        self.death: str | None = None
        """Why no step can be made any more."""
        self._has_died = threading.Event()
        self._dying = threading.Lock()
        self._on_death: Callable[[], None] = lambda: None
        self._aborter: threading.Thread | None = None
        self._is_closed = False
        self._size = config.tp
        self._nodes: Nodes | None = None
        self._local = LocalRanks(lambda why, _: self._lost(why))
        address = config.dist_init_addr
        self._store = make_store(config.tp, 0 if address is None else split_address(address)[1])
        try:
            here = ("127.0.0.1", self._store.port)
            if config.nnodes > 1:
                self._nodes = Nodes(self._store.port, config, facts, self._lost)
                before_exit(self.dismiss)
            self._local.start(range(1, config.ranks_per_node), here, model_path, config)
            with self.failing_together():
                if self._nodes is not None:
                    self._meet(self._nodes, config)
                self.wait_for("here")
                if device.type == "cuda":
                    torch.cuda.set_device(0)  # the others take those after it
                info, one_host = DistributedInfo(0, config.tp, config.ep), config.nnodes == 1
                join_group(info, self._store, device, TIMEOUT_S, one_host=one_host)
                self._channel = CommandChannel(TIMEOUT_S)
        except BaseException as error:
            self.close(why=f"node 0 did not start: {type(error).__name__}: {error}")
            self.leave()
            raise

    # -- waiting ---------------------------------------------------------------------------

    def wait_for(self, what: str) -> None:
        """Until each has told `what`; raises `EngineDeadError` if one ends before.

        There is no other limit: as long as its process lives, a rank may still be loading.
        """

        def missing() -> list[int]:
            return [r for r in range(1, self._size) if not self._store.check([f"{what} {r}"])]

        self._wait(missing, f'"{what}" from rank')

    def all_loaded(self) -> None:
        """Wait until each rank's weights are there, however long one takes beyond the others:
        more than a collective would wait."""
        self.wait_for("loaded")
        self._store.set("all loaded", "")

    def _meet(self, nodes: Nodes, config: EngineConfig) -> None:
        try:
            self._wait(nodes.missing, "node", JOIN_S)
        except TimeoutError as error:
            absent = ", ".join(map(str, nodes.missing()))
            raise ConfigError(
                f"--nnodes {config.nnodes}: of the nodes {absent} did not come to "
                f"{config.dist_init_addr} in {JOIN_S:g} s; run `minisgl serve` there with the same "
                "flags and its --node-rank"
            ) from error

    def _wait(self, missing: Callable[[], list[int]], whom: str, limit_s: float = math.inf) -> None:
        start = said = time.monotonic()
        while waited_for := missing():
            if self.death is not None:
                raise self.failure()
            now = time.monotonic()
            if now - start > limit_s:
                raise TimeoutError
            if now - said > LOG_S:
                said = now
                who = ", ".join(map(str, waited_for))
                logger.warning("rank 0 has waited %.0f s for %s %s", now - start, whom, who)
            time.sleep(0.02)

    # -- telling ---------------------------------------------------------------------------

    def send(self, commands: bytes) -> None:
        """Tell all of them; raises `EngineDeadError` if that can't be."""
        if self.death is not None:
            raise self.failure()
        try:
            self._channel.send(commands)
        except (RuntimeError, ValueError) as error:  # the latter of a group that was aborted
            raise self.failure(error) from error

    # -- failing ---------------------------------------------------------------------------

    @contextmanager
    def alike(self) -> Iterator[None]:
        """For a call that all ranks make: one that ends half-way here leaves them different."""
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        except BaseException as error:
            self._lost(f"rank 0 was interrupted in a step by {type(error).__name__}")
            raise

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If another rank's end is what made the start fail, raise that."""
        try:
            yield
        except RuntimeError as error:
            # An error of ours has a cause here, or names it.
            if not isinstance(error, MinisglError) and self._knows_who():
                raise self.failure() from error
            raise

    def failure(self, error: Exception | None = None) -> EngineDeadError:
        """What to raise when `error` came of a step: for good, and naming who ended if one did."""
        if error is not None and not self._knows_who():
            self._die(f"tensor-parallel rank 0 can't go on: {type(error).__name__}: {error}")
        why = self.death or ""
        for rank in range(1, self._size):
            if self._store.check([f"failed {rank}"]):
                why += f"; rank {rank}: {self._store.get(f'failed {rank}').decode()}"
        return EngineDeadError(why)

    def on_death(self, function: Callable[[], None]) -> None:
        """Have it called, in a thread, as soon as a rank has ended that should not."""
        self._on_death = function
        if self.death is not None:
            function()

    def _knows_who(self) -> bool:
        """Whether it is known, or soon will be, that another rank has ended."""
        return self._has_died.wait(GRACE_S if self._nodes is None else SILENCE_S + GRACE_S)

    def _lost(self, why: str) -> None:
        """In a thread that noticed an end."""
        if not self._is_closed and self._die(why):
            # Not in this thread, for whose end those wait who end all children.
            threading.Thread(target=self._after_death, name="on death", daemon=True).start()

    def _after_death(self) -> None:
        self._local.stop(0.0)  # what rank 0 waits for may be one of these, who waits for the dead
        self._on_death()

    def _die(self, why: str) -> bool:
        """False if it has happened already: the first reason is the cause of others."""
        with self._dying:
            if self.death is not None:
                return False
            self.death = why
        self._has_died.set()
        logger.error("%s", why)
        if self._nodes is not None:
            self._nodes.tell_end(why)
        self._abort()
        return True

    def _abort(self) -> None:
        """What this process waits for on a GPU would never come. Aborting may itself take long."""
        if self._aborter is None:
            self._aborter = threading.Thread(target=abort_group, name="abort group", daemon=True)
            self._aborter.start()

    # -- ending ----------------------------------------------------------------------------

    def close(self, farewell: bytes = b"", why: str = "") -> None:
        """End them all; any number of times. Told `farewell`, they do first what they were told
        before: rank 0's device may wait for their part of it. Other nodes are told `why`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._local.expect_end()
        all_ended = False
        if farewell and self.death is None:
            with suppress(RuntimeError, ValueError):
                self._channel.send(farewell)
                deadline = time.monotonic() + FAREWELL_S
                all_ended = self._local.wait(deadline)
                if self._nodes is not None:
                    self._nodes.wait_left(deadline)
        if self._nodes is not None:
            self._nodes.end(self.death or why)
        self._local.stop(2.0)
        if not all_ended:
            self._abort()

    def leave(self) -> None:
        """Leave the group; after `close`, and after the graphs that hold its calls are gone."""
        if self._aborter is not None:
            self._aborter.join(GRACE_S)
        leave_group()
        # Each holds the store's port.
        self.__dict__.pop("_channel", None)
        self.__dict__.pop("_store", None)

    def dismiss(self) -> None:
        """Tell other nodes that this one ends, and that all is well."""
        self._is_closed = True
        if self._nodes is not None:
            self._nodes.end(self.death or "")

    def kill(self) -> None:
        """End them all at once; what this process waits for may never come."""
        self._is_closed = True
        self._local.stop(0.0)
        if self._nodes is not None:
            self._nodes.end(self.death or "")
