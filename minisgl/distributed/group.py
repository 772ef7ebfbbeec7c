"""Joining and leaving the group of ranks, and the commands that rank 0 gives the others."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .info import DistributedInfo, get_tp_info, set_tp_info

__all__ = ["CommandChannel", "find_store", "join_group", "leave_group", "make_store"]

_FOREVER = timedelta(days=365)
"""Ranks without work wait for commands; that rank 0 died is seen by its closed connection."""
_INLINE = 4096
"""Bytes of a command list that go with the first broadcast."""
_LENGTH = 8


def make_store(size: int) -> TCPStore:
    """Where ranks of this host find each other: on a port that the system chose."""
    return TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)


def find_store(port: int, size: int) -> TCPStore:
    """Rank 0's store, from another rank."""
    return TCPStore("127.0.0.1", port, size, is_master=False)


def join_group(info: DistributedInfo, store: Store, device: torch.device, timeout_s: float) -> None:
    """Make this process the rank that `info` says; returns when all have joined.

    Collectives are gloo's on a CPU and NCCL's on CUDA; one that takes longer than `timeout_s`
    raises `RuntimeError`, as does one whose peer died.
    """
    set_tp_info(info)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=info.rank,
        world_size=info.size,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_group() -> None:
    """This process is rank 0 of 1 again."""
    if dist.is_initialized():
        dist.destroy_process_group()
    set_tp_info(None)


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
