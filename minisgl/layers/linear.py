"""Linear layers, each with its way of being cut over the tensor-parallel ranks.

    y = x W^T + b        W [out, in], one `linear`; or a `QuantizedWeight` in parts

    LinearReplicated         every rank has all of W
    LinearColParallelMerged  rows of W (outputs) are cut; several projections stacked
    LinearQKVMerged          rows are cut by attention head; q, k, v stacked
    LinearRowParallel        columns of W (inputs) are cut; the partial sums are all-reduced
    LinearOProj              the same, cut by attention head

Sizes that the ranks do not divide are cut by ceil division (`utils.partition`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.distributed import DistributedCommunicator, get_tp_info
from minisgl.kernel.linear import can_pack, pack_linear_weight
from minisgl.utils import div_even, partition

from .base import BaseOP
from .quantized import QuantizedWeight, apply_linear

__all__ = [
    "Linear",
    "LinearColParallelMerged",
    "LinearOProj",
    "LinearQKVMerged",
    "LinearReplicated",
    "LinearRowParallel",
    "local_heads",
]


def local_heads(num_qo_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """This rank's (query heads, KV heads); KV heads are replicated when ranks outnumber them."""
    size = get_tp_info().size
    if size >= num_kv_heads:
        div_even(size, num_kv_heads, "tensor-parallel size")
        return div_even(num_qo_heads, size, "num_qo_heads"), 1
    return div_even(num_qo_heads, size, "num_qo_heads"), div_even(
        num_kv_heads, size, "num_kv_heads"
    )


class Linear(BaseOP):
    """Weights `[local_output_size, local_input_size]` and, when there is one, the bias.

    `part_rows` are the local outputs of each projection that is merged into it.
    """

    def __init__(
        self, full: tuple[int, int], local: tuple[int, Sequence[int]], has_bias: bool
    ) -> None:
        """`full`: inputs and outputs of all ranks; `local`: inputs and `part_rows` of this one."""
        self.full_input_size, self.full_output_size = full
        self.local_input_size, self.part_rows = local[0], tuple(local[1])
        self.local_output_size = sum(self.part_rows)
        self.weight: torch.Tensor | QuantizedWeight = torch.empty(
            self.local_output_size, self.local_input_size
        )
        if has_bias:
            self.bias = torch.empty(self.local_output_size)
        self._has_bias = has_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, local_input_size]` to `[T, local_output_size]`."""
        return apply_linear(x, self.weight, self.bias if self._has_bias else None)

    def set_storage(self, types: Sequence[str]) -> None:
        """Replace the weight, not loaded yet, by parts of these types, one for each projection."""
        assert isinstance(self.weight, torch.Tensor)
        self.weight = QuantizedWeight.like(self.weight, types, self.part_rows)

    def pack(self) -> None:
        """Bring the loaded weight into the layout of the fast path, where there is one."""
        if isinstance(self.weight, torch.Tensor) and can_pack(self.weight):
            self.weight = pack_linear_weight(self.weight)


class LinearReplicated(Linear):
    """A whole copy on each rank (the MoE router)."""

    def __init__(self, input_size: int, output_size: int, has_bias: bool = False) -> None:
        super().__init__((input_size, output_size), (input_size, [output_size]), has_bias)


class LinearColParallelMerged(Linear):
    """Several projections of one input, each with its outputs cut over the ranks (gate, up)."""

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], has_bias: bool = False
    ) -> None:
        tp = get_tp_info()
        local = [partition(n, tp.rank, tp.size).length for n in output_sizes]
        super().__init__((input_size, sum(output_sizes)), (input_size, local), has_bias)


class LinearQKVMerged(Linear):
    """q, k and v in this order, cut by head: local rows are `(Hq + 2 Hk) * D` of this rank."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_qo_heads: int,
        num_kv_heads: int,
        has_bias: bool = False,
    ) -> None:
        local_q, local_kv = local_heads(num_qo_heads, num_kv_heads)
        full = (num_qo_heads + 2 * num_kv_heads) * head_dim
        local = [heads * head_dim for heads in (local_q, local_kv, local_kv)]
        super().__init__((hidden_size, full), (hidden_size, local), has_bias)


class LinearRowParallel(Linear):
    """The inputs are cut over the ranks, the results summed (down_proj)."""

    def __init__(self, input_size: int, output_size: int, has_bias: bool = False) -> None:
        tp = get_tp_info()
        local = partition(input_size, tp.rank, tp.size).length
        super().__init__((input_size, output_size), (local, [output_size]), has_bias)
        self._comm = DistributedCommunicator()
        self._tp_size = tp.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, local_input_size]` to the summed `[T, output_size]`."""
        if self._tp_size == 1:
            return super().forward(x)
        y = self._comm.all_reduce(apply_linear(x, self.weight))
        return y + self.bias if self._has_bias else y  # after the sum: the bias counts once


class LinearOProj(LinearRowParallel):
    """The attention's output projection; its inputs are this rank's query heads."""

    def __init__(
        self, num_qo_heads: int, head_dim: int, hidden_size: int, has_bias: bool = False
    ) -> None:
        div_even(num_qo_heads, get_tp_info().size, "num_qo_heads")
        super().__init__(num_qo_heads * head_dim, hidden_size, has_bias)
