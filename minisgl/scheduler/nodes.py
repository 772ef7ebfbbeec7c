"""Several hosts: how they agree, and how each learns that another has ended.

    key in node 0's store       set by      says
    facts                       node 0      flags, versions and model, which must be the same
    node K                      node K      it has come; a number, so that only one does
    beat K                      node K      it lives: a count that goes up every half second
    died K                      node K      why it can't go on
    refused                     any node    why it can't join: what it was told differs
    end                         node 0      the engine has ended; empty, or why
    left K                      node K      its ranks have ended

Whose beats stop is taken for dead. So nothing here waits for the store without limit, and what is
known of a node is never older than `SILENCE_S`. `other_node.py` is the other side.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields

import msgspec
import torch

from minisgl.config import EngineConfig, ResolvedConfig, flag_name, split_address
from minisgl.distributed import find_store
from minisgl.models import ModelInfo
from minisgl.utils.logger import get_logger

__all__ = [
    "JOIN_S",
    "POLL_S",
    "SILENCE_S",
    "Facts",
    "Nodes",
    "differences",
    "make_facts",
    "warn_of_loopback",
]

logger = get_logger(__name__)

JOIN_S = 300.0
"""Nodes wait so long for each other at the start."""
SILENCE_S = 5.0
"""A node that is silent for longer counts as dead."""
POLL_S = 0.5
LEAVE_S = 2.0
"""For nodes to see that the engine has ended."""

Facts = dict[str, dict[str, str]]
"""What nodes must agree on: names and values, in groups of which the earlier explain the later."""

_LOCAL = frozenset({"node_rank", "dist_init_addr", "threads", "memory_ratio", "reasons"})
"""Fields of the configuration that may differ: an address has many names, and ranks agree on
the fewest pages."""


def make_facts(info: ModelInfo, config: EngineConfig, resolved: ResolvedConfig) -> Facts:
    """Those of this node."""
    return {
        "versions": {"torch's version": torch.__version__.partition("+")[0]},
        "flags": {
            flag_name(item.name): str(getattr(config, item.name))
            for item in fields(config)
            if item.name not in _LOCAL
        },
        "model": {
            f"the model's {name}": str(value) for name, value in sorted(vars(info.config).items())
        },
        "choices": {
            f"the choice of {item.name}": str(getattr(resolved, item.name))
            for item in fields(resolved)
            if item.name not in _LOCAL
        },
    }


def differences(first: Facts, other: Facts, node: int) -> str:
    """In words what node 0 and this `node` don't agree on; empty if they do."""
    for group in dict.fromkeys((*first, *other)):
        ours, theirs = first.get(group, {}), other.get(group, {})
        found = [
            f"{name} is {ours.get(name)} on node 0 and {theirs.get(name)} on node {node}"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]
        if found:
            return "; ".join(found)
    return ""


def warn_of_loopback(address: str) -> None:
    """Say so if gloo will offer an interface of this host that other hosts don't reach.

    It takes that of the host's name; `address` is where the nodes meet.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or _is_loopback(split_address(address)[0]):
        return
    name = socket.gethostname()
    if _is_loopback(name):
        logger.warning(
            "this host's name, %s, leads to the loopback interface, which other nodes don't reach: "
            "set GLOO_SOCKET_IFNAME to the interface that they do",
            name,
        )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


class Nodes:
    """The other nodes, as node 0 sees them."""

    def __init__(
        self, port: int, config: EngineConfig, facts: Facts, lost: Callable[[str], None]
    ) -> None:
        """Tell them the facts by the store at `port` of this host, and watch those that come;
        `lost` is told, in a thread, of one that has ended."""
        assert config.dist_init_addr is not None
        warn_of_loopback(config.dist_init_addr)
        # A connection of its own: a call that waits keeps others on the same one waiting.
        self._store = find_store("127.0.0.1", port)
        self._store.set("facts", msgspec.json.encode(facts).decode())
        self._others = range(1, config.nnodes)
        self._lost = lost
        self._dead: set[int] = set()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch nodes", daemon=True)
        self._watcher.start()
        atexit.register(self.end)  # a program may end without closing its engine

    def missing(self) -> list[int]:
        """Who has not come yet."""
        return [node for node in self._others if not self._beats(node)]

    def tell_end(self, why: str) -> None:
        """Have all end that belongs to this engine, with these words; empty if all is well."""
        if not self._store.check(["end"]):
            self._store.set("end", why)

    def wait_left(self, deadline: float) -> None:
        """Until the ranks of all that live have ended, or it is so late."""
        while time.monotonic() < deadline:
            here = [node for node in self._others if node not in self._dead and self._beats(node)]
            if all(self._store.check([f"left {node}"]) for node in here):
                return
            time.sleep(0.02)

    def end(self, why: str = "") -> None:
        """Tell them the end and give them a moment to see it; any number of times."""
        atexit.unregister(self.end)
        self._is_over.set()
        with suppress(RuntimeError):  # nobody else ends this store, but it's no time to fail
            self.tell_end(why)
            self.wait_left(time.monotonic() + LEAVE_S)
        if self._watcher is not threading.current_thread():
            self._watcher.join()

    def _beats(self, node: int) -> int:
        """How often it has said that it lives."""
        return self._store.add(f"beat {node}", 0)

    def _watch(self) -> None:
        beats: dict[int, int] = {}
        heard_s: dict[int, float] = {}
        while not self._is_over.wait(POLL_S):
            if self._store.check(["refused"]):  # by a node that this one may not even count
                self._lost(self._store.get("refused").decode())
            for node in self._others:
                count = self._beats(node)
                if count != beats.get(node, 0):
                    beats[node], heard_s[node] = count, time.monotonic()
                why = self._why_dead(node, heard_s.get(node))
                if why and node not in self._dead:
                    self._dead.add(node)
                    self._lost(why)

    def _why_dead(self, node: int, heard_s: float | None) -> str:
        """In words; empty if it lives, or has not come yet."""
        if self._store.check([f"died {node}"]):
            return self._store.get(f"died {node}").decode()
        if heard_s is not None and time.monotonic() - heard_s > SILENCE_S:
            silent = f"node {node} has been silent for {SILENCE_S:g} s"
            return f"{silent}: it was killed, hangs, or can't be reached"
        return ""
