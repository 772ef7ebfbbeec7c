"""Collectives on the tensor-parallel group, by torch.distributed's default process group."""

from __future__ import annotations

import torch

from .info import get_tp_info

__all__ = ["DistributedCommunicator"]


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
