"""Joining and leaving the group of ranks, and the commands that rank 0 gives the others."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store, TCPStore

from minisgl.errors import ConfigError

from .impl import connect_peers, release_peers, use_peers
from .info import DistributedInfo, get_tp_info, set_tp_info

__all__ = [
    "CommandChannel",
    "abort_group",
    "find_store",
    "join_group",
    "leave_group",
    "make_store",
]

_FOREVER = timedelta(days=365)
"""Ranks without work wait for commands; that rank 0 died is seen by its closed connection."""
_LEAVE_S = 10.0
_INLINE = 4096
"""Bytes of a command list that go with the first broadcast."""
_LENGTH = 8


def make_store(size: int, port: int = 0) -> TCPStore:
    """Where ranks find each other: on a port of the loopback interface that the system chose, or
    on this one of all interfaces. Raises `ConfigError` if the port can't be had.
    """
    if not port:
        listening = socket.create_server(("127.0.0.1", 0))
        chosen, descriptor = listening.getsockname()[1], listening.detach()
        return TCPStore(
            "127.0.0.1",
            chosen,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    try:
        return TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        why = "it is in use" if "EADDRINUSE" in str(error) else str(error).partition("\n")[0]
        raise ConfigError(
            f"--dist-init-addr: can't listen on port {port}: {why}; end what has it, or choose "
            "another port, the same on all nodes"
        ) from error


def find_store(host: str, port: int, timeout_s: float = 300.0) -> TCPStore:
    """Rank 0's store, from another rank or thread; calls that wait do so for `timeout_s`."""
    return TCPStore(
        host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join_group(
    info: DistributedInfo, store: Store, device: torch.device, timeout_s: float, *, one_host: bool
) -> None:
    """Make this process the rank that `info` says; returns when all have joined.

    Collectives are gloo's on a CPU and NCCL's on CUDA; one that takes longer than `timeout_s`
    raises `RuntimeError`, as does one whose peer died. With `one_host`, whose GPU i is rank i's,
    small sums go through memory that GPUs map from each other, where that is faster.
    """
    set_tp_info(info)
    if device.type == "cuda" and info.is_primary():
        # When a peer is gone, collectives are to end, but not this process, which may be a user's.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=info.rank,
        world_size=info.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if device.type == "cuda" and one_host:
        connect_peers(torch.device("cuda", torch.cuda.current_device()))


def leave_group() -> None:
    """This process is rank 0 of 1 again."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # It waits for the device, which waits for a lost rank if aborting did not help.
        leaving = threading.Thread(target=_leave, name="leave group", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
    else:
        _leave()
    set_tp_info(None)


def _leave() -> None:
    use_peers(None)
    with suppress(RuntimeError, ValueError, AssertionError):  # it was aborted meanwhile
        if dist.is_initialized():
            dist.destroy_process_group()


def abort_group() -> None:
    """Let go who waits for a collective on a GPU, whose peer is gone; call it in another thread.

    Its results mean nothing. gloo's collectives, which can't be aborted, end with the connection.
    """
    threading.Thread(target=release_peers, name="release peers", daemon=True).start()
    with suppress(RuntimeError, ValueError, AssertionError):  # the group was left meanwhile
        if dist.is_initialized() and dist.get_backend() == "nccl":
            c10d._abort_process_group()


class CommandChannel:
    """Bytes from rank 0 to all others, in order."""

    def __init__(self, timeout_s: float) -> None:
        """Rank 0 waits for a rank that takes nothing no longer than `timeout_s`."""
        timeout = timedelta(seconds=timeout_s) if get_tp_info().is_primary() else _FOREVER
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._first = torch.zeros(_LENGTH + _INLINE, dtype=torch.uint8)

    def send(self, data: bytes) -> None:
        """On rank 0."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._first[:_LENGTH] = torch.tensor([len(data)]).view(torch.uint8)
        self._first[_LENGTH : _LENGTH + min(len(data), _INLINE)] = content[:_INLINE]
        dist.broadcast(self._first, 0, self._group)
        if len(data) > _INLINE:
            dist.broadcast(content, 0, self._group)

    def receive(self) -> bytes:
        """On the others: waits for as long as it takes."""
        assert not get_tp_info().is_primary()
        dist.broadcast(self._first, 0, self._group)
        size = int(self._first[:_LENGTH].view(torch.int64))
        content = self._first[_LENGTH : _LENGTH + size]
        if size > _INLINE:
            content = torch.zeros(size, dtype=torch.uint8)
            dist.broadcast(content, 0, self._group)
        return content.numpy().tobytes()
