"""Who chooses the tokens of a batch: PyTorch, the native kernels on a CPU, or Triton's on a GPU.

    Drawer       a token for every row of a batch, by its plan: what the sampler calls
    RowDrawer    tokens for the rows that draw, by their parameters: what a kernel offers

`BatchDrawer` makes a `Drawer` of a `RowDrawer`; `TritonDrawer` (`triton_drawer.py`) is one itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.kernel import sampling
from minisgl.utils.transfer import to_device

from .penalties import Penalties, PoolPenalties
from .sampling_plan import SamplingPlan

__all__ = ["BatchDrawer", "Drawer", "RowDrawer", "TorchDrawer"]


class Drawer(Protocol):
    """Chooses a token for each row of a batch."""

    def choose(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A token for each row of `logits [B, V]`: `[B]` int64 on their device.

        Of a row that draws, temperature, filters and random key are the plan's and `positions
        [B]` int64; of the others it is the lowest id of the largest logit. `sent` are the
        positions on the device, where they are there already.
        """
        ...

    def penalties(self, token_pool: torch.Tensor) -> Penalties:
        """What penalizes by the tokens in `token_pool [rows, L]` int32, on the same device."""
        ...


class RowDrawer(Protocol):
    """Draws tokens; `NativeDrawer` in `kernel/cpu/sample.py` is one, `TorchDrawer` the reference.

    Parameters come as arrays on the host, `[b]` with one entry a row that draws.
    """

    def uniform(
        self, seeds: np.ndarray, positions: np.ndarray, choices: np.ndarray
    ) -> torch.Tensor:
        """A random number in [0, 1) for each key of int64 `[b]`: float64 `[b]` on the device."""
        ...

    def draw(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """A token for each of `rows [b]` of `logits [B, V]` float32: int64 `[b]` on the device.

        `rows` are int64 and so is `top_k` (V: off); the other parameters are float32, the
        temperature above 0, `top_p` in (0, 1] and `min_p` in [0, 1].
        """
        ...


class BatchDrawer:
    """A `Drawer` that leaves the rows that draw to a `RowDrawer`."""

    def __init__(self, row_drawer: RowDrawer, device: torch.device) -> None:
        self._row_drawer = row_drawer
        self._device = device

    def choose(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Drawer`."""
        draws, count = plan.draws, len(plan.draws.rows)
        if not count:
            return sampling.argmax(logits)
        uniform = self._row_drawer.uniform(plan.seeds, positions[draws.rows], plan.choices)
        drawn = self._row_drawer.draw(logits.float(), *draws, uniform)
        if count == logits.shape[0]:
            return drawn
        tokens = sampling.argmax(logits)
        tokens[to_device(draws.rows, self._device)] = drawn
        return tokens

    def penalties(self, token_pool: torch.Tensor) -> Penalties:
        """The reference's."""
        return PoolPenalties(token_pool)


class TorchDrawer:
    """The reference, which sorts each row that has a filter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def uniform(
        self, seeds: np.ndarray, positions: np.ndarray, choices: np.ndarray
    ) -> torch.Tensor:
        """See `RowDrawer`."""
        keys = to_device(np.stack((seeds, positions, choices)), self._device)
        return sampling.philox_uniform(*keys.unbind())

    def draw(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """See `RowDrawer`."""
        probs = self.probs(logits, rows, temperature, top_k, top_p, min_p)
        return sampling.sample_from_probs(probs, uniform)

    def probs(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
    ) -> torch.Tensor:
        """What `draw` draws from: `[b, V]` float32, 0 where filtered, not renormalized."""
        vocab_size = logits.shape[1]
        if len(rows) != logits.shape[0]:
            logits = logits[to_device(rows, self._device)]
        scaled = logits.float() / to_device(temperature, self._device).unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
        if filtered.size:
            index = to_device(filtered, self._device)
            filters = (to_device(x[filtered], self._device) for x in (top_k, top_p, min_p))
            probs[index] = sampling.filter_probs(scaled[index], *filters)
        return probs
