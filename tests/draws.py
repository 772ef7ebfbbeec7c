"""Draws for tests, and which of them rounding could change.

Two implementations round differently, so a token may differ where the random number lies at a
border of the cumulative distribution, or where the sum of probabilities reaches `top_p`. Borders
are those of the reference; what lies within `MARGIN` of one is counted and not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minisgl.engine.drawer import TorchDrawer
from minisgl.engine.sampling_plan import Draws

REFERENCE = TorchDrawer(torch.device("cpu"))
MARGIN = 1e-6
"""Of a sum of probabilities. Both round logits / temperature to float32, each in its own way:
measured, the borders of the two lie less than a tenth of this apart."""


def draws(
    rows: Sequence[int],
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 2**40,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
) -> Draws:
    """One entry a row of each; a single one is for all."""

    def spread(values: Any, dtype: type[np.generic]) -> np.ndarray:
        return np.array(np.broadcast_to(np.array(values, dtype), len(rows)))

    return Draws(
        spread(rows, np.int64),
        spread(temperature, np.float32),
        spread(top_k, np.int64),
        spread(top_p, np.float32),
        spread(min_p, np.float32),
    )


def mixed_draws(size: int, vocab: int, seed: int) -> Draws:
    """Filters of all kinds that end anywhere, for rows 0 to `size`."""
    rng = np.random.default_rng(seed)
    return draws(
        range(size),
        temperature=rng.uniform(0.1, 2, size).tolist(),
        top_k=np.where(rng.random(size) < 0.5, vocab, rng.integers(1, 2 + vocab, size)).tolist(),
        top_p=np.where(rng.random(size) < 0.3, 1.0, rng.uniform(0.01, 1, size)).tolist(),
        min_p=np.where(rng.random(size) < 0.5, 0.0, rng.random(size) ** 3).tolist(),
    )


def near_end(logits: torch.Tensor, how: Draws) -> torch.Tensor:
    """`[b]` bool: whether rounding could change what the filters keep, by the reference's sums."""
    # The end of top_p: what the most likely tokens of those that top_k keeps have in sum.
    unfiltered = how._replace(top_p=np.ones_like(how.top_p), min_p=np.zeros_like(how.min_p))
    probs = TorchDrawer(logits.device).probs(logits, *unfiltered).double()
    ordered = probs.sort(dim=1, descending=True).values
    reached = ordered.cumsum(dim=1) / ordered.sum(dim=1, keepdim=True)
    ends = torch.from_numpy(np.stack((how.top_p, how.min_p))).to(logits.device).double()
    top_p, min_p = ends.unsqueeze(2).unbind()
    near = ((reached - top_p).abs() < MARGIN).any(dim=1) & (top_p < 1).squeeze(1)
    # The end of min_p, where nothing is added up.
    fraction = ordered / ordered[:, :1] / min_p
    return near | ((fraction - 1).abs() < MARGIN).any(dim=1)


def near_border(logits: torch.Tensor, how: Draws, uniform: torch.Tensor) -> torch.Tensor:
    """`[b]` bool: whether rounding could change what is drawn, by the reference's sums."""
    probs = TorchDrawer(logits.device).probs(logits, *how).double()
    cumulative = probs.cumsum(dim=1) / probs.sum(dim=1, keepdim=True)
    near = ((cumulative - uniform.unsqueeze(1)).abs() < MARGIN).any(dim=1)
    return near | near_end(logits, how)
