"""Sampling by Triton kernels: all that a step needs of it stays on the device.

A plan's parameters are uploaded once and kept for as long as the sampler has the same plan, so a
decoding batch uploads at most positions, and nothing where the step's own transfer brought them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Req
from minisgl.kernel.triton.penalties import add_tokens, apply_penalties, count_tokens, new_counts
from minisgl.kernel.triton.sample import choose_tokens
from minisgl.kernel.triton.threshold import find_thresholds
from minisgl.utils.transfer import to_device

from .penalties import Penalties
from .sampling_plan import SamplingPlan, has_penalties

__all__ = ["CountedPenalties", "TritonDrawer"]


@dataclass(frozen=True)
class _Parameters:
    """A plan on the device, with an entry for each row of the batch `[B]`."""

    plan: SamplingPlan
    temperature: torch.Tensor
    """0 where the row is greedy."""
    seeds: torch.Tensor
    choices: torch.Tensor
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """`top_k`, `top_p` and `min_p`; None if nobody filters."""

    @classmethod
    def of(cls, plan: SamplingPlan, vocab_size: int, device: torch.device) -> _Parameters:
        draws, size = plan.draws, len(plan.reqs)
        ints = np.zeros((3, size), dtype=np.int64)
        floats = np.zeros((3, size), dtype=np.float32)
        ints[2], floats[1] = vocab_size, 1.0  # off, as a min_p of 0 is
        ints[:, draws.rows] = plan.seeds, plan.choices, draws.top_k
        floats[:, draws.rows] = draws.temperature, draws.top_p, draws.min_p
        filtered = (ints[2] < vocab_size) | (floats[1] < 1) | (floats[2] > 0)
        seeds, choices, top_k = to_device(ints, device).unbind()
        temperature, top_p, min_p = to_device(floats, device).unbind()
        filters = (top_k, top_p, min_p) if filtered.any() else None
        return cls(plan, temperature, seeds, choices, filters)


class TritonDrawer:
    """A `Drawer`: two kernels choose the token of every row, after one more if any row filters.

    The same tokens as the reference's, but where rounding moves a border that the random number
    lies at. Results of a row are the same bits whatever the other rows. The token of a row with a
    NaN is some valid id.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._kept: _Parameters | None = None

    def choose(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Drawer`; `logits` of 16 or 32 bits, as they come."""
        kept = self._kept
        if kept is None or kept.plan is not plan:
            kept = self._kept = _Parameters.of(plan, self._vocab_size, self._device)
        places = to_device(positions, self._device) if sent is None else sent
        keys = kept.seeds, places, kept.choices
        if kept.filters is None:
            return choose_tokens(logits, kept.temperature, *keys)
        ends = find_thresholds(logits, kept.temperature, *kept.filters)
        return choose_tokens(logits, kept.temperature, *keys, *ends)

    def penalties(self, token_pool: torch.Tensor) -> Penalties:
        """Those whose counts stay on the device."""
        return CountedPenalties(token_pool, self._vocab_size)


@dataclass(frozen=True)
class _Penalized:
    """The penalized rows of a plan on the device, while they have these rows of the pool."""

    plan: SamplingPlan
    pool_rows: np.ndarray
    places: torch.Tensor
    """In the batch `[c]`."""
    rows: torch.Tensor
    """In the token pool `[c]`."""
    values: torch.Tensor
    """`[c, 3]`."""


class CountedPenalties:
    """`Penalties` that count a request's tokens when it is attached, and each sampled one then.

    The device does everything in the order it was told, so a step may be launched before the host
    knows the tokens of the last. The step that a finished request computes in vain counts in its
    own row, which the next owner has counted anew.
    """

    def __init__(self, token_pool: torch.Tensor, vocab_size: int) -> None:
        """`token_pool [rows, L]` int32; the counts, 2 bytes for each row and id, are made when the
        first request with penalties comes."""
        self._token_pool = token_pool
        self._vocab_size = vocab_size
        self._counts: torch.Tensor | None = None
        self._kept: _Penalized | None = None

    def attach(self, req: Req) -> None:
        """See `Penalties`."""
        if not has_penalties(req.params):
            return
        if self._counts is None:
            rows, device = self._token_pool.shape[0], self._token_pool.device
            self._counts = new_counts(rows, self._vocab_size, device)
        count_tokens(self._counts, self._token_pool, req.row, req.prompt_len, len(req.token_ids))

    def apply(
        self, logits: torch.Tensor, plan: SamplingPlan, rows: np.ndarray, positions: np.ndarray
    ) -> None:
        """See `Penalties`; whatever was added counts, and `positions` are not read."""
        kept = self._of(plan, rows)
        apply_penalties(logits, kept.places, self._made(), kept.rows, kept.values)

    def add(self, tokens: torch.Tensor, plan: SamplingPlan, rows: np.ndarray) -> None:
        """See `Penalties`."""
        kept = self._of(plan, rows)
        add_tokens(self._made(), kept.rows, tokens, kept.places)

    def _made(self) -> torch.Tensor:
        assert self._counts is not None, "a request with penalties was never attached"
        return self._counts

    def _of(self, plan: SamplingPlan, rows: np.ndarray) -> _Penalized:
        pool_rows, kept = rows[plan.penalized], self._kept
        # A request that was retracted and came back may have another row.
        if kept is None or kept.plan is not plan or (kept.pool_rows != pool_rows).any():
            device = self._token_pool.device
            places, on_device = to_device(np.stack((plan.penalized, pool_rows)), device).unbind()
            values = to_device(plan.penalties, device)
            kept = self._kept = _Penalized(plan, pool_rows, places, on_device, values)
        return kept
