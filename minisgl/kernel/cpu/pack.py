"""Weights in the layout that the native kernels read; `csrc/weights.h` draws it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from minisgl.kernel.quant import BLOCKS
from minisgl.utils.memory import Arena

from .build import library
from .pool import ThreadPool
from .structs import Experts, Linear, Weight

__all__ = ["NATIVE_TYPES", "PackedExperts", "PackedWeight", "linear_struct", "pack_weight"]

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


def linear_struct(weights: Sequence[PackedWeight], bias: int | None = None) -> Linear:
    """Up to three weights of one input, and the address of the float32 bias of all outputs."""
    parts = (Weight * 3)(*[weight.struct() for weight in weights])
    return Linear(count=len(weights), weights=parts, bias=bias)


class PackedExperts(NamedTuple):
    """A mixture of E experts, of which each token takes `top_k`.

    Where every token passes one more expert, it is the last of `gate_up` and `down`.
    """

    router: Sequence[PackedWeight]
    """`[E, hidden]`, and `[1, hidden]` if there is one more."""
    gate_up: Sequence[Sequence[PackedWeight]]
    """Each expert's gate and up, `[I, hidden]`."""
    down: Sequence[PackedWeight]
    """`[hidden, I]` each."""
    top_k: int
    renormalize: bool
    """Whether the weights of a token's experts sum to 1."""

    def struct(self) -> Experts:
        """For the kernels; the memory stays this object's. Raises `ValueError` for weights that
        don't belong together, or fewer experts than a token takes."""
        self._check()
        return Experts(
            count=self.router[0].n,
            chosen=self.top_k,
            renormalize=self.renormalize,
            shared=len(self.router) - 1,
            router=linear_struct(self.router),
            gate_up=(Linear * len(self.gate_up))(*map(linear_struct, self.gate_up)),
            down=(Linear * len(self.down))(*[linear_struct([weight]) for weight in self.down]),
        )

    def _check(self) -> None:
        experts, hidden = self.router[0].n, self.router[0].k
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"a token takes {self.top_k} of {experts} experts: not 1 to {experts}")
        rows = [part.n for part in self.router]
        held = sum(rows)
        if rows[1:] not in ([], [1]) or not held == len(self.gate_up) == len(self.down):
            raise ValueError(
                f"the router has {rows} outputs, and there are gates and ups of "
                f"{len(self.gate_up)} experts and downs of {len(self.down)}"
            )
        for i, (halves, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            shapes = [(part.n, part.k) for part in (*halves, down)]
            if shapes != [(down.k, hidden)] * 2 + [(hidden, down.k)]:
                raise ValueError(
                    f"expert {i} has gate, up and down of {shapes}: the router takes {hidden}, so "
                    f"they must be two of (inner, {hidden}) and one of ({hidden}, inner)"
                )


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
