"""All-reduce through memory that the GPUs of one host map from each other.

A decode step reduces some kilobytes twice a layer, and latency is all that this costs. Each rank
copies its part into its own buffer, tells the others, waits until they have told it, and adds up
all buffers: one launch (the "one-shot" reduction of torch's symmetric memory), instead of the
rings and trees of NCCL that pay for large tensors. Which of the two is faster for what size is
measured when the ranks meet, and it is the slowest rank that counts, so that all choose alike.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ["PeerMemory", "Timing", "faster_up_to", "measure"]

MAX_BYTES = 8 << 20
_ALIGNMENT = 16  # bytes, of what the kernel loads at once
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds
_SIZES = tuple(1 << power for power in range(12, 24))
_CALLS, _REPEATS = 20, 5


class Timing(NamedTuple):
    """Seconds of an all-reduce of so many bytes, on the slowest rank."""

    size_bytes: int
    peers_s: float
    group_s: float


class PeerMemory:
    """This rank's buffer and its peers'; making it is a collective.

    All of the processes must do so for the first time: torch counts a process's meetings, and
    looks for those of others under the same number.
    """

    has_met = False
    """Whether this process has made one."""

    def __init__(self, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        """Raises `RuntimeError` where the GPUs can't map each other's memory."""
        # Hosts may share the multicast objects that this would make, and has no use for.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        self.max_bytes = max_bytes
        """Of the largest tensor that it takes."""
        self._name: str = group.group_name
        PeerMemory.has_met = True
        self._buffer = symmetric.empty(max_bytes, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._buffer, group)
        self._device = device
        size = self._handle.world_size
        shape = self._handle.signal_pad_size // torch.int32.itemsize // size, size
        self._flags = [
            self._handle.get_signal_pad(rank, shape, torch.int32) for rank in range(size)
        ]
        self._is_over = threading.Event()
        # Kernels are loaded at their first use, which may wait for all that runs on the device:
        # when a rank is lost, that would be too late.
        torch.empty(shape, dtype=torch.int32, device=device)[:, 0].fill_(1)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it can reduce such a tensor, and does it faster than the group."""
        return (
            0 < x.nbytes <= self.max_bytes
            and x.dtype in _DTYPES
            and x.is_contiguous()
            and not (x.nbytes % _ALIGNMENT or x.data_ptr() % _ALIGNMENT)
        )

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum a tensor that it `takes` over the ranks, in place; one launch, graphs may hold it."""
        flat = x.view(-1)
        own = self._buffer[: x.nbytes].view(x.dtype)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(own, flat, "sum", self._name, flat)

    def release(self) -> None:
        """Let this rank's kernels go on that wait for a dead one, until `close`; what they compute
        means nothing. For a thread of its own.

        Each block of a kernel has a flag for each rank on every rank. It waits for a 0 in its own
        rank's on another and makes it 1, then for a 1 in the other's here and makes it 0: so ones
        are written here, and zeros there. What it sends itself goes on as ever.
        """
        own = self._handle.rank
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            while not self._is_over.wait(0.0005):
                for other, flags in enumerate(self._flags):
                    if other != own:
                        self._flags[own][:, other].fill_(1)
                        flags[:, own].fill_(0)

    def close(self) -> None:
        """End what `release` does, when this rank's kernels have ended: all wait for them then."""
        torch.cuda.synchronize(self._device)
        self._is_over.set()


def measure(peers: PeerMemory) -> list[Timing]:
    """Time both ways of reducing bfloat16 tensors up to `peers.max_bytes`; a collective."""
    timings = []
    for size in _SIZES:
        if size > peers.max_bytes:
            break
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=peers._device)
        times = [_time(peers.all_reduce, x), _time(dist.all_reduce, x)]
        slowest = torch.tensor(times, dtype=torch.float64, device=peers._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        timings.append(Timing(size, *slowest.tolist()))
    return timings


def faster_up_to(timings: list[Timing]) -> int:
    """The size in bytes up to which peers' memory was faster than the group, without exception."""
    size = 0
    for timing in timings:
        if timing.peers_s >= timing.group_s:
            break
        size = timing.size_bytes
    return size


def _time(reduce: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Seconds of a call in a CUDA graph, as steps make it: the least of several measurements."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        reduce(x)  # what a first call allocates can't be captured
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                reduce(x)
        best = float("inf")
        for _ in range(_REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / _CALLS)
    return best
