"""How tokens are drawn: in PyTorch on any device, or by the native kernels on a CPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.kernel import sampling
from minisgl.utils.transfer import to_device

__all__ = ["Drawer", "TorchDrawer"]


class Drawer(Protocol):
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


class TorchDrawer:
    """The reference, which sorts each row that has a filter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def uniform(
        self, seeds: np.ndarray, positions: np.ndarray, choices: np.ndarray
    ) -> torch.Tensor:
        """See `Drawer`."""
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
        """See `Drawer`."""
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
        scaled = logits / to_device(temperature, self._device).unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1) | (min_p > 0))
        if filtered.size:
            index = to_device(filtered, self._device)
            filters = (to_device(x[filtered], self._device) for x in (top_k, top_p, min_p))
            probs[index] = sampling.filter_probs(scaled[index], *filters)
        return probs
