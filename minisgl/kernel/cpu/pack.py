"""Weights in the layout that the native kernels read; `csrc/weights.h` draws it."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from minisgl.kernel.quant import BLOCKS
from minisgl.utils.memory import Arena

from .build import library
from .pool import ThreadPool
from .structs import Weight

__all__ = ["NATIVE_TYPES", "PackedWeight", "pack_weight"]

NATIVE_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    "Q8_0": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "Q4_K": 5,
    "Q6_K": 6,
}
"""What the kernels multiply: plain types, and the names of GGUF's blocks."""


class PackedWeight(NamedTuple):
    """Weights `[n, k]` of one type; `data` is uint8, in panels of 32 outputs."""

    type: int
    n: int
    k: int
    data: torch.Tensor

    def struct(self) -> Weight:
        """For the kernels; the memory stays this object's."""
        return Weight(self.type, self.n, self.k, self.data.data_ptr())


def pack_weight(
    pool: ThreadPool, tensor: torch.Tensor, kind: str | None = None, arena: Arena | None = None
) -> PackedWeight:
    """`tensor [n, k]` float32 or bfloat16, or with a block type `[n, bytes of a row]` uint8.

    The packed bytes come from `arena`, or lie in memory of their own.
    """
    key = kind if kind is not None else tensor.dtype
    if key not in NATIVE_TYPES or tensor.dim() != 2 or tensor.device.type != "cpu":
        raise ValueError(
            f"The native kernels can't take a {tensor.dtype} {tuple(tensor.shape)} weight on "
            f"{tensor.device} as {key}; they take {', '.join(map(str, NATIVE_TYPES))} matrices"
        )
    n, k = tensor.shape
    if kind is not None:
        form = BLOCKS[kind]
        if tensor.dtype != torch.uint8 or k % form.nbytes:
            raise ValueError(
                f"{kind} blocks are uint8 rows of a multiple of {form.nbytes} bytes, not "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
        k = k // form.nbytes * form.values
    if tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    native, code = library(), NATIVE_TYPES[key]
    native.minisgl_panel_bytes.restype = ctypes.c_int64
    panel = native.minisgl_panel_bytes(ctypes.c_int(code), ctypes.c_int64(k))
    data = (arena or Arena()).take((n + 31) // 32 * panel)
    native.minisgl_pack(
        pool.handle,
        ctypes.c_int(code),
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_int64(tensor.stride(0) * tensor.element_size()),
        ctypes.c_int64(n),
        ctypes.c_int64(k),
        ctypes.c_void_p(data.data_ptr()),
    )
    return PackedWeight(code, n, k, data)
