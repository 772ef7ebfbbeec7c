"""Weights that mean nothing, for measuring a model's speed where its checkpoint isn't there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl.errors import ConfigError

from .base import BaseLLMModel

__all__ = ["random_weights"]

DEVIATION = 0.02
"""What published models are initialized with: logits and activations stay of ordinary size."""


def random_weights(
    model: BaseLLMModel, device: torch.device, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` for every weight of a model on meta: its shape and dtype, on `device`.

    Norms are ones, everything else is normal with standard deviation 0.02. Values are drawn on
    the device, so that a large model takes seconds; they depend on `seed`, the kind of device, and
    a tensor's place and shape, so that what ranks have whole is the same on all of them. Raises
    `ConfigError` for weights in blocks, which random bytes would not make numbers of an ordinary
    size.
    """
    generator = torch.Generator(device)
    for index, (name, like) in enumerate(model.state_dict().items()):
        if not like.dtype.is_floating_point:
            raise ConfigError(
                f"random weights can't be quantized ({name} is {like.dtype}): use "
                "--quantization none"
            )
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1)
        else:
            generator.manual_seed((seed << 16) + index)
            yield name, tensor.normal_(0, DEVIATION, generator=generator)
