"""The tensor that holds all keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minisgl.utils import memory

__all__ = ["KVPool", "KVShape"]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


@dataclass(frozen=True)
class KVShape:
    """Sizes of one rank's KV pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one page over all layers, with the scales of int8."""
        vectors = 2 * self.num_layers * self.page_size * self.num_kv_heads
        scale_bytes = 4 if dtype == torch.int8 else 0
        return vectors * (self.head_dim * dtype.itemsize + scale_bytes)


class KVPool:
    """`[2, layers, num_pages + 1, page_size, Hk, D]`; the last page is the dummy.

    A token at position `i` of a request lies in slot `pages[i // page_size] * page_size +
    i % page_size`. The dummy page belongs to nobody: padding may read and write it.

    In int8 each head of a token has a scale of its own, `scales [2, layers, slots, Hk]` float32
    (None for other types): the largest magnitude of its D values over 127.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.dummy_page = num_pages
        pages, heads = num_pages + 1, shape.num_kv_heads
        lead = (2, shape.num_layers)
        self.data = _zeros((*lead, pages, shape.page_size, heads, shape.head_dim), dtype, device)
        self.scales: torch.Tensor | None = None
        if dtype == torch.int8:
            self.scales = _zeros((*lead, pages * shape.page_size, heads), torch.float32, device)
        self._pages = [(self.data[0, i], self.data[1, i]) for i in range(shape.num_layers)]
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._pages]

    def pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer by page: `[num_pages + 1, page_size, Hk, D]` each."""
        return self._pages[layer_id]

    def clear(self, pages: torch.Tensor) -> None:
        """Zero pages `[n]` int64 over all layers, when they get a new owner.

        Backends may read a page's unused slots and mask them; but 0 * NaN is NaN, so what an
        earlier owner's overflow left there must not stay.
        """
        self.data.index_fill_(2, pages, 0)

    def slots(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory by slot: `[(num_pages + 1) * page_size, Hk, D]` each."""
        return self._slots[layer_id]
