"""Collectives on the tensor-parallel group, by torch.distributed's default process group."""

from __future__ import annotations

import torch

from .info import get_tp_info

__all__ = ["DistributedCommunicator"]


class DistributedCommunicator:
    """all_reduce and all_gather over the ranks; with one rank both return their input."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""
        if get_tp_info().size > 1:
            _require_group()
            torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' equally shaped `[n, ...]` along dim 0: `[size * n, ...]`."""
        size = get_tp_info().size
        if size == 1:
            return x
        _require_group()
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(out, x.contiguous())
        return out


def _require_group() -> None:
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{get_tp_info()} needs torch.distributed.init_process_group() before collectives"
        )
