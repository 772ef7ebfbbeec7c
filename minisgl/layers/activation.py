"""Gated activations by the name that configs give them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.errors import UnsupportedModelError
from minisgl.kernel import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul

__all__ = ["get_gated_activation"]

_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}


def get_gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The op `act(gate) * up` on `[T, 2 I]` for a config's `hidden_act`."""
    if name not in _GATED:
        raise UnsupportedModelError(
            f"Unsupported activation: {name!r}; supported: {', '.join(_GATED)}"
        )
    return _GATED[name]
