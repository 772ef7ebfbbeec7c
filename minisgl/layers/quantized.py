"""`QuantizedWeight`: what an op has in place of a weight tensor when its blocks are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minisgl.distributed import get_tp_info
from minisgl.errors import ConfigError
from minisgl.kernel import indexing, linear
from minisgl.kernel.quant import BLOCKS, dequantize, quant_indexing, quant_linear

from .base import BaseOP

__all__ = [
    "DENSE",
    "QuantizedWeight",
    "WeightPart",
    "apply_linear",
    "blocks_like",
    "dequantized_stack",
    "look_up",
]

DENSE = "dense"


class WeightPart(NamedTuple):
    """Some consecutive rows of a weight, all stored alike.

    `type` is "dense", with `tensor [rows, K]` in the model's dtype, or a format of
    `kernel.quant.BLOCKS`, with `tensor [rows, bytes of a row]` uint8.
    """

    type: str
    tensor: torch.Tensor


class QuantizedWeight(BaseOP):
    """A weight `[rows, K]` in parts, one for each projection that was merged: q, k, v; gate, up.

    Files mix formats within a layer, so each part has its own, and a name of its own in the
    `state_dict`: `qkv_proj.weight.0` is q. `dtype` is the model's, `shape` that of the weights.
    """

    def __init__(self, parts: Sequence[WeightPart], width: int, dtype: torch.dtype) -> None:
        self.parts = list(parts)
        self.shape = (sum(part.tensor.shape[0] for part in parts), width)
        self.dtype = dtype

    @classmethod
    def like(
        cls, weight: torch.Tensor, types: Sequence[str], rows: Sequence[int]
    ) -> QuantizedWeight:
        """Empty parts of these types and rows for the weights of `weight [sum(rows), K]`.

        Raises what `blocks_like` raises.
        """
        width = weight.shape[1]
        parts = []
        for kind, count in zip(types, rows, strict=True):
            part = weight.new_empty(count, width)
            parts.append(WeightPart(kind, part if kind == DENSE else blocks_like(part, kind)))
        return cls(parts, width, weight.dtype)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, K]` to `[T, rows]`, the reference: dequantize, then multiply."""
        outs = [
            linear(x, tensor) if kind == DENSE else quant_linear(x, tensor, kind)
            for kind, tensor in self.parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids [T]` as `[T, K]` in the model's dtype; for a weight of one part."""
        [(kind, tensor)] = self.parts
        if kind == DENSE:
            return indexing(tensor, ids)
        return quant_indexing(tensor, kind, ids, self.dtype)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, part in enumerate(self.parts):
            yield str(index), part.tensor

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        self.parts[int(name)] = self.parts[int(name)]._replace(tensor=tensor)

    def _numel(self, name: str, tensor: torch.Tensor) -> int:
        return tensor.shape[0] * self.shape[1]


def blocks_like(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Memory for `weight [..., K]` in blocks: uint8 `[..., bytes of a row]`.

    Raises `ConfigError` for a K that the format's blocks do not divide, and on several ranks:
    their shards would cut blocks apart.
    """
    if get_tp_info().size != 1:
        raise ConfigError("Quantized weights run on one rank only: use --quantization none")
    form, width = BLOCKS[kind], weight.shape[-1]
    if width % form.values:
        raise ConfigError(
            f"Weights with rows of {width} can't be {kind}, whose blocks are "
            f"{form.values}: use --quantization none"
        )
    row_bytes = width // form.values * form.nbytes
    return weight.new_empty((*weight.shape[:-1], row_bytes), dtype=torch.uint8)


def dequantized_stack(blocks: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """`blocks [E, rows, bytes of a row]` as weights `[E, rows, K]`, one after another."""
    return torch.stack([dequantize(each, kind).to(dtype) for each in blocks])


def apply_linear(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x [T, K]` times `weight [out, K]` transposed, plus `bias [out]`: `[T, out]`."""
    if isinstance(weight, torch.Tensor):
        return linear(x, weight, bias)
    out = weight.linear(x)
    return out if bias is None else out.add_(bias)


def look_up(
    weight: torch.Tensor | QuantizedWeight,
    ids: torch.Tensor,
    vocab_range: tuple[int, int] | None = None,
) -> torch.Tensor:
    """`kernel.indexing` for either kind of weight; a quantized one is never cut into ranges."""
    if isinstance(weight, torch.Tensor):
        return indexing(weight, ids, vocab_range)
    assert vocab_range is None, "QuantizedWeight.like refuses several ranks"
    return weight.look_up(ids)
