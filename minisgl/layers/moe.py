"""The experts of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.distributed import DistributedCommunicator, get_tp_info
from minisgl.kernel import grouped_experts, topk_softmax
from minisgl.kernel.quant import BLOCKS
from minisgl.utils import Span, partition

from .base import BaseOP
from .quantized import DENSE, blocks_like, dequantized_stack

__all__ = ["MoELayer"]


class MoELayer(BaseOP):
    """SwiGLU experts, packed: `gate_up_proj [E, 2 I, hidden]`, `down_proj [E, hidden, I]`.

    Under tensor parallelism each expert's intermediate size is cut like a dense MLP's. Under expert
    parallelism a rank holds whole experts, E of them its own: as many as others, fewer, or none.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        renormalize: bool,
    ) -> None:
        tp = get_tp_info()
        held, inner = Span(0, num_experts), intermediate_size
        if tp.ep:
            held = partition(num_experts, tp.rank, tp.size)
        else:
            inner = partition(intermediate_size, tp.rank, tp.size).length
        self.gate_up_proj = torch.empty(held.length, 2 * inner, hidden_size)
        self.down_proj = torch.empty(held.length, hidden_size, inner)
        self._first_expert = held.start
        self.types = {"gate_up_proj": DENSE, "down_proj": DENSE}
        """Of both weights: "dense", or the block format in which they are uint8 `[..., bytes]`."""
        self.top_k = top_k
        self.renormalize = renormalize
        self._comm = DistributedCommunicator()

    def forward(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x [T, hidden]`, `router_logits [T, all experts]` to `[T, hidden]`.

        `shared [T, hidden]` is this rank's part of what all tokens' expert gives: summed over the
        ranks together with the rest.
        """
        weights, ids = topk_softmax(router_logits, self.top_k, self.renormalize)
        gate_up, down = (self._dense(name, x.dtype) for name in self.types)
        out = grouped_experts(
            x, gate_up, down, weights, ids, self._first_expert, router_logits.shape[1]
        )
        if shared is not None:
            out = out + shared
        return self._comm.all_reduce(out)

    def set_storage(self, types: Sequence[str]) -> None:
        """Make room for blocks of these types in place of the weights, not loaded yet."""
        for name, kind in zip(self.types, types, strict=True):
            self.types[name] = kind
            if kind != DENSE:
                setattr(self, name, blocks_like(getattr(self, name), kind))

    def _dense(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, name)
        kind = self.types[name]
        return weight if kind == DENSE else dequantized_stack(weight, kind, dtype)

    def _numel(self, name: str, tensor: torch.Tensor) -> int:
        kind = self.types[name]
        if kind == DENSE:
            return tensor.numel()
        return tensor.numel() // BLOCKS[kind].nbytes * BLOCKS[kind].values
