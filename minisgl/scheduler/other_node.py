"""The life of a node other than node 0, which holds some of the ranks and answers nobody.

connect ─> check the facts, start the ranks ─> beat ... ─> node 0 closed ─────────> returns
   |           └──────────────────────────────> something ended that should not ─> raises
   └─> node 0 is not there in time ───────────────────────────────────────────────> raises
"""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from types import FrameType
from typing import NamedTuple

import msgspec
from torch._C._distributed_c10d import Store

from minisgl.config import EngineConfig, split_address
from minisgl.distributed import find_store
from minisgl.errors import ConfigError, EngineDeadError, MinisglError
from minisgl.models import load_model_info
from minisgl.utils.hardware import Hardware
from minisgl.utils.hf import resolve_model_path
from minisgl.utils.logger import get_logger

from .build import resolve_here
from .nodes import JOIN_S, POLL_S, SILENCE_S, Facts, differences, make_facts, warn_of_loopback
from .ranks import LOG_S, LocalRanks

__all__ = ["run_node"]

logger = get_logger(__name__)

_STOP_S = 2.0
"""For ranks to end, and for node 0 to be told."""


def run_node(model: str, config: EngineConfig) -> None:
    """Hold this node's ranks until node 0 closes.

    Raises `ConfigError` if node 0 is not there in `JOIN_S` seconds, or has a node of this rank
    already, and `EngineDeadError` with the cause when something failed, on whichever node.
    """
    # The first look at CUDA devices may hold the interpreter for seconds, and beats with it.
    Hardware.detect()
    joined = _connect(config)
    _Node(model, config, joined.store, joined.facts).run()


class _Joined(NamedTuple):
    """What a node gets from node 0."""

    store: Store
    facts: Facts
    num_come: int
    """How many have come as this node."""


def _connect(config: EngineConfig) -> _Joined:
    """Come to node 0 once it is there."""
    assert config.dist_init_addr is not None
    flag = config.dist_init_addr
    warn_of_loopback(flag)
    logger.info("node %d waits for node 0 at %s", config.node_rank, flag)
    address = _reach(flag)
    joined: queue.SimpleQueue[_Joined | Exception] = queue.SimpleQueue()
    threading.Thread(target=_join, args=(address, config, joined), daemon=True).start()
    try:
        found = joined.get(timeout=2 * SILENCE_S)
    except queue.Empty as error:
        found = error
    if isinstance(found, Exception):
        why = str(found) or "no answer"
        raise ConfigError(
            f"--dist-init-addr = {flag}: what listens there is no node 0 ({why})"
        ) from found
    if found.num_come > 1:
        raise ConfigError(
            f"--node-rank {config.node_rank}: a node of this rank has come to {flag} already; "
            "each host has its own, below --nnodes"
        )
    return found


def _reach(flag: str) -> tuple[str, int]:
    """Host and port, when somebody listens there."""
    address = split_address(flag)
    start = said = time.monotonic()
    while True:
        try:
            socket.create_connection(address, timeout=SILENCE_S).close()
            return address
        except OSError as error:
            now = time.monotonic()
            if now - start > JOIN_S:
                raise ConfigError(
                    f"--dist-init-addr = {flag}: node 0 was not there in {JOIN_S:g} s ({error}); "
                    "start it with the same address, one of its own that this node reaches"
                ) from error
            if now - said > LOG_S:
                said = now
                logger.warning("node 0 is not at %s yet (%s)", flag, error)
            time.sleep(POLL_S)


def _join(
    address: tuple[str, int],
    config: EngineConfig,
    joined: queue.SimpleQueue[_Joined | Exception],
) -> None:
    """In a thread: a store waits without limit for who takes its connection and says nothing."""
    try:
        store = find_store(*address, timeout_s=SILENCE_S)
        facts = msgspec.json.decode(store.get("facts"), type=Facts)
        joined.put(_Joined(store, facts, store.add(f"node {config.node_rank}", 1)))
    except (RuntimeError, msgspec.MsgspecError) as error:
        joined.put(error)


class _Node:
    """This node: its ranks, and the thread that speaks with node 0."""

    def __init__(self, model: str, config: EngineConfig, store: Store, facts: Facts) -> None:
        self._model = model
        self._config = config
        self._store = store
        self._facts = facts
        self._rank = config.node_rank
        self._causes: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Why to end; empty when node 0 closed. The first one counts."""
        first = self._rank * config.ranks_per_node
        self._ranks = range(first, first + config.ranks_per_node)
        self._num_done = 0
        self._is_refused = False
        self._local = LocalRanks(self._exited)
        self._beat_s = time.monotonic()
        self._report = ""
        """What to tell node 0 at the end, if it does not know."""
        self._is_over = threading.Event()
        self._has_stopped = threading.Event()

    def run(self) -> None:
        """See `run_node`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        talk = threading.Thread(target=self._talk, name="talk", daemon=True)
        talk.start()
        # Finding the model may take minutes, and node 0 may end meanwhile.
        threading.Thread(target=self._prepare, name="prepare", daemon=True).start()
        cause = self._wait()
        self._is_over.set()
        self._local.stop(_STOP_S)
        self._has_stopped.set()
        # It may sit in a call that node 0 does not answer.
        talk.join(max(0, _STOP_S + self._beat_s - time.monotonic()))
        if cause:
            raise EngineDeadError(cause)
        logger.info("node 0 has closed")

    def _wait(self) -> str:
        while True:
            try:
                return self._causes.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - self._beat_s > SILENCE_S:
                    return f"node 0 has not answered for {SILENCE_S:g} s"

    def _end(self, cause: str) -> None:
        """Because of something here, of which node 0 must hear."""
        self._report = self._report or cause
        self._causes.put(cause)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._end(f"node {self._rank} was ended by {signal.Signals(number).name}")

    def _exited(self, why: str, code: int) -> None:
        if code:
            self._end(why)
            return
        self._num_done += 1  # rank 0 said that all is done
        if self._num_done == len(self._ranks):
            self._causes.put("")

    def _prepare(self) -> None:
        config, rank = self._config, self._rank
        try:
            path = resolve_model_path(self._model)
            info = load_model_info(path)
            found = differences(
                self._facts, make_facts(info, config, resolve_here(info, config)), rank
            )
            if found:
                self._is_refused = True
                return self._end(f"node {rank} can't join: {found}; give all nodes the same")
            assert config.dist_init_addr is not None
            self._local.start(self._ranks, split_address(config.dist_init_addr), path, config)
        except Exception as error:
            if not isinstance(error, MinisglError):
                logger.exception("Node %d did not start", rank)
            return self._end(f"node {rank} did not start: {type(error).__name__}: {error}")
        ranks = ", ".join(map(str, self._ranks))
        logger.info(
            "node %d of %d holds ranks %s (of %d); it serves no HTTP, and ends with node 0 at %s",
            *(rank, config.nnodes, ranks, config.tp, config.dist_init_addr),
        )

    def _talk(self) -> None:
        """In a thread: a call to a host that vanished may take very long."""
        rank, store = self._rank, self._store
        try:
            while not self._is_over.is_set():
                store.add(f"beat {rank}", 1)
                self._beat_s = time.monotonic()
                if store.check(["end"]):
                    self._causes.put(store.get("end").decode())
                    break
                self._is_over.wait(POLL_S)
            if self._report:
                store.set("refused" if self._is_refused else f"died {rank}", self._report)
            self._has_stopped.wait(2 * _STOP_S)
            store.set(f"left {rank}", "")
        except RuntimeError:
            self._causes.put(
                f"node 0 is gone: nothing answers at {self._config.dist_init_addr} any more"
            )
