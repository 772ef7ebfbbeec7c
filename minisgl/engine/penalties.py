"""Who knows which tokens a request has, for its penalties; the reference counts them each step."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.core import Req
from minisgl.kernel import sampling
from minisgl.utils.transfer import to_device

from .sampling_plan import SamplingPlan

__all__ = ["Penalties", "PoolPenalties"]


class Penalties(Protocol):
    """Changes the logits of a plan's `penalized` rows. `rows [B]` are the token pool's."""

    def attach(self, req: Req) -> None:
        """The token pool holds all tokens of `req` in its row, which was another's before."""
        ...

    def apply(
        self, logits: torch.Tensor, plan: SamplingPlan, rows: np.ndarray, positions: np.ndarray
    ) -> None:
        """Penalize, in `logits [B, V]` float32, what each row has before `positions [B]`."""
        ...

    def add(self, tokens: torch.Tensor, plan: SamplingPlan, rows: np.ndarray) -> None:
        """`tokens [B]` int64 were sampled."""
        ...


class PoolPenalties:
    """The reference: counts what the token pool holds, in each step anew."""

    def __init__(self, token_pool: torch.Tensor) -> None:
        self._token_pool = token_pool

    def attach(self, req: Req) -> None:
        """Nothing is kept of a request."""

    def apply(
        self, logits: torch.Tensor, plan: SamplingPlan, rows: np.ndarray, positions: np.ndarray
    ) -> None:
        """See `Penalties`."""
        device, vocab_size = logits.device, logits.shape[1]
        rows, positions = rows[plan.penalized], positions[plan.penalized]
        width = int(positions.max())
        bounds = to_device(np.stack((rows, plan.prompt_lens, positions)), device)
        row, prompt_end, output_end = bounds.unsqueeze(2).unbind()
        tokens = self._token_pool[row.squeeze(1), :width].long()  # [c, width]
        column = torch.arange(width, device=device)
        in_prompt = column < prompt_end
        in_output = ~in_prompt & (column < output_end)
        index = to_device(plan.penalized, device)
        logits[index] = sampling.apply_penalties(
            logits[index],
            sampling.token_counts(tokens.where(in_prompt, -1), vocab_size),
            sampling.token_counts(tokens.where(in_output, -1), vocab_size),
            to_device(plan.penalties, device),
        )

    def add(self, tokens: torch.Tensor, plan: SamplingPlan, rows: np.ndarray) -> None:
        """The engine writes them into the pool."""
