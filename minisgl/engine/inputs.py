"""A batch's tensors, made from its lengths and the tables on the device."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core import Batch
from minisgl.utils.transfer import to_device

__all__ = ["fill_batch"]


def fill_batch(
    batch: Batch, token_pool: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> None:
    """Set `input_ids`, `positions` and `out_loc`, each `[T]` int64.

    `token_pool [rows, max_len + 1]` and `page_table [rows, max_pages]` are int32. Token ids are
    read on the device, so that a step needs nothing of the one before on the host.
    """
    row, batch.positions = to_device(_token_coordinates(batch), token_pool.device).unbind()
    batch.input_ids = token_pool[row, batch.positions].long()
    page = page_table[row, batch.positions // page_size].long()
    batch.out_loc = page * page_size + batch.positions % page_size


def _token_coordinates(batch: Batch) -> np.ndarray:
    """Row and position of every token of the step, `[2, T]` int64."""
    extend = batch.extend_lens
    # Count up over the whole batch, then shift each request's stretch to begin at cached_len.
    before = np.cumsum(extend) - extend
    positions = np.arange(extend.sum()) - np.repeat(before - batch.cached_lens, extend)
    return np.stack((np.repeat(batch.rows, extend), positions))
