"""Collectives on the tensor-parallel group.

They are torch.distributed's on its default process group; small tensors on GPUs of one host are
reduced through memory that these map from each other, if `use_peers` said so (`peers.py`).
"""

from __future__ import annotations

import torch

from minisgl.utils.logger import get_logger

from .info import get_tp_info
from .peers import PeerMemory, faster_up_to, measure

__all__ = ["DistributedCommunicator", "connect_peers", "release_peers", "use_peers"]

logger = get_logger(__name__)

_peers: PeerMemory | None = None


def use_peers(peers: PeerMemory | None) -> None:
    """Reduce what `peers` takes through it from now on; None for nothing."""
    global _peers
    if _peers is not None:
        _peers.close()
    _peers = peers


def connect_peers(device: torch.device) -> None:
    """Reduce small tensors through peers' memory from now on, where that is possible and faster.

    A collective of all ranks, which are on one host and have its first GPUs, one each.
    """
    others = [i for i in range(torch.distributed.get_world_size()) if i != device.index]
    can_meet = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if not _all_say(can_meet, device):
        logger.info("all_reduce: by NCCL, as GPUs here can't map each other's memory")
        return
    if not _all_say(not PeerMemory.has_met, device):
        logger.info("all_reduce: by NCCL, as a process can meet peers only once, and one has")
        return
    peers: PeerMemory | None = None
    try:
        peers = PeerMemory(device)
    except RuntimeError as error:
        logger.warning("GPUs can't map each other's memory: %s", error)
    if not _all_say(peers is not None, device) or peers is None:
        return
    use_peers(peers)  # measuring, too, may wait for a rank that is lost
    timings = measure(peers)
    peers.max_bytes = faster_up_to(timings)
    logger.info(
        "all_reduce: through peers' memory up to %d KiB, then by NCCL (%s)",
        peers.max_bytes >> 10,
        ", ".join(
            f"{size >> 10} KiB {ours * 1e6:.1f} against {theirs * 1e6:.1f} us"
            for size, ours, theirs in timings
        ),
    )


def _all_say(yes: bool, device: torch.device) -> bool:
    """Whether all ranks do: they must go the same way."""
    return bool(DistributedCommunicator().smallest(int(yes), device))


def release_peers() -> None:
    """Let this rank's kernels go on that wait for a lost one, until `use_peers(None)`; for a
    thread of its own."""
    if _peers is not None:
        _peers.release()


class DistributedCommunicator:
    """Collectives over the ranks there are when it is made; with one rank each returns its input.

    So a model that was made alone stays alone, whatever group this process joins later.
    """

    def __init__(self) -> None:
        self._size = get_tp_info().size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""
        if self._size > 1:
            _require_group()
            if _peers is not None and _peers.takes(x):
                _peers.all_reduce(x)
            else:
                torch.distributed.all_reduce(x)
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on all ranks, in place; returns `x`."""
        if self._size > 1:
            _require_group()
            torch.distributed.broadcast(x, 0)
        return x

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values, on all of them."""
        if self._size == 1:
            return value
        _require_group()
        least = torch.tensor(value, dtype=torch.int64, device=device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' equally shaped `[n, ...]` along dim 0: `[size * n, ...]`."""
        if self._size == 1:
            return x
        _require_group()
        out = x.new_empty((self._size * x.shape[0], *x.shape[1:]))
        _all_gather(out, x.contiguous())
        return out


# Renamed in torch 2.13.
_all_gather = getattr(torch.distributed, "all_gather_single", None) or (
    torch.distributed.all_gather_into_tensor
)


def _require_group() -> None:
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{get_tp_info()} needs torch.distributed.init_process_group() before collectives"
        )
