"""Large blocks of CPU memory, in the system's huge pages where it has them.

A step streams through all weights. With pages of 4 KiB the CPU looks up an address every 64 cache
lines, and its prefetcher stops at each page's end; with 2 MiB the same loop reads 45 instead of
37 GB/s here (docs/log.md).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

__all__ = ["Arena", "zeros"]


def zeros(num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` uint8; the system hands the memory out, zeroed, when it is first touched.

    `torch.zeros` would write all of it at once: 5 s for a KV pool of 7 GB.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; huge pages are for private memory only
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    else:
        block = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(block, dtype=torch.uint8)


class Arena:
    """Hands out pieces of large blocks, for many tensors that stay as long as any of them."""

    _BLOCK_BYTES = 64 << 20
    _ALIGNMENT = 64  # a cache line

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """`[num_bytes]` uint8, zeroed, beginning with a cache line."""
        if self._used + num_bytes > self._block.numel():
            self._block = zeros(max(num_bytes, self._BLOCK_BYTES))
            self._used = 0
        piece = self._block[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT
        return piece
