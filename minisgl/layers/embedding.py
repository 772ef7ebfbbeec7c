"""The vocabulary: token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from minisgl.core import ModelInputs, get_global_ctx
from minisgl.distributed import DistributedCommunicator, get_tp_info
from minisgl.kernel import linear
from minisgl.kernel.linear import can_pack, pack_linear_weight
from minisgl.utils import Span, div_ceil, partition

from .base import BaseOP, StateDict
from .quantized import QuantizedWeight, apply_linear, look_up

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]

PIECE_ROWS = 256
"""Rows of prompt logits computed at once: 256 x 151,936 float32 are 156 MB."""


class VocabParallelEmbedding(BaseOP):
    """Each rank holds a slice of the vocabulary's rows; ids outside of it contribute zeros."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        tp = get_tp_info()
        self.vocab_size = vocab_size
        self.vocab_range: Span = partition(vocab_size, tp.rank, tp.size)
        self.weight: torch.Tensor | QuantizedWeight = torch.empty(
            self.vocab_range.length, hidden_size
        )
        self._tp_size = tp.size
        self._comm = DistributedCommunicator()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids [T]` to `[T, hidden]`."""
        if self._tp_size == 1:
            return look_up(self.weight, ids)
        return self._comm.all_reduce(look_up(self.weight, ids, self.vocab_range))

    def set_storage(self, types: Sequence[str]) -> None:
        """Replace the weight, not loaded yet, by one part of the only type in `types`."""
        assert isinstance(self.weight, torch.Tensor)
        self.weight = QuantizedWeight.like(self.weight, types, [self.vocab_range.length])


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits, at each request's last position only.

    With `tied` to an embedding it has no weight of its own and uses the embedding's; a
    `weight` in the checkpoint is then dropped.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tied: VocabParallelEmbedding | None = None
    ) -> None:
        if tied is None:
            super().__init__(vocab_size, hidden_size)
        else:
            self.vocab_size, self.vocab_range = vocab_size, tied.vocab_range
            self._tp_size, self._comm = tied._tp_size, tied._comm
        self._tied = tied
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, hidden]` of the current batch to logits `[size, vocab_size]`."""
        batch = get_global_ctx().batch
        if batch.prompt_logits is not None:
            self._prompt_rows(x, batch)
        if batch.is_prefill:
            x = x[batch.attn_metadata.get_last_indices(batch.size)]
        return self.project(x, batch.logits_out)

    def project(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`x [n, hidden]` to `[n, vocab_size]`, gathered from all ranks.

        On one rank with a plain weight it is written to the first rows of `out [>= n, vocab_size]`,
        if that is given.
        """
        weight = self.weight if self._tied is None else self._tied.weight
        if self._packed is not None:
            local = apply_linear(x, self._packed)
        elif out is not None and self._tp_size == 1 and isinstance(weight, torch.Tensor):
            return linear(x, weight, out=out[: x.shape[0]])
        else:
            local = apply_linear(x, weight)
        if self._tp_size == 1:
            return local
        # Ranks hold unequal shares when they do not divide the vocabulary: pad to the largest.
        share = div_ceil(self.vocab_size, self._tp_size)
        local = F.pad(local, (0, share - local.shape[1]))
        ranks = self._comm.all_gather(local).view(self._tp_size, x.shape[0], share)
        return ranks.transpose(0, 1).reshape(x.shape[0], -1)[:, : self.vocab_size]

    def pack(self) -> None:
        """Bring the loaded weight into the layout of the fast path, where there is one.

        A tied weight is copied: the embedding looks rows up in the plain layout.
        """
        weight = self.weight if self._tied is None else self._tied.weight
        if isinstance(weight, torch.Tensor) and can_pack(weight):
            self._packed = pack_linear_weight(weight)
            if self._tied is None:
                self.weight = self._packed

    def _prompt_rows(self, x: torch.Tensor, batch: ModelInputs) -> None:
        sink = batch.prompt_logits
        assert sink is not None
        for offset in range(0, sink.rows.shape[0], PIECE_ROWS):
            rows = sink.rows[offset : offset + PIECE_ROWS]
            sink.collect(offset, self.project(x[rows]))

    def _take(self, state_dict: StateDict, prefix: str) -> None:
        if self._tied is not None:
            state_dict.pop(f"{prefix}weight", None)
        super()._take(state_dict, prefix)
