"""A batch's tensors, made from its requests' lengths and the tables on the device."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core import Batch, Req

__all__ = ["fill_batch"]


def fill_batch(
    batch: Batch, token_pool: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> None:
    """Set `input_ids`, `positions` and `out_loc`, each `[T]` int64.

    `token_pool [rows, max_len + 1]` and `page_table [rows, max_pages]` are int32. Token ids are
    read on the device, so that a step needs nothing of the one before on the host.
    """
    rows, positions = _token_coordinates(batch.reqs)
    device = token_pool.device
    row = torch.from_numpy(rows).to(device, non_blocking=True)
    batch.positions = torch.from_numpy(positions).to(device, non_blocking=True)
    batch.input_ids = token_pool[row, batch.positions].long()
    page = page_table[row, batch.positions // page_size].long()
    batch.out_loc = page * page_size + batch.positions % page_size


def _token_coordinates(reqs: list[Req]) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every token of the step, int64, without a Python loop over tokens."""
    extend = np.array([req.extend_len for req in reqs])
    cached = np.array([req.cached_len for req in reqs])
    row = np.repeat(np.array([req.row for req in reqs]), extend)
    # Count up over the whole batch, then shift each request's stretch to begin at cached_len.
    before = np.cumsum(extend) - extend
    positions = np.arange(extend.sum()) - np.repeat(before - cached, extend)
    return row, positions
