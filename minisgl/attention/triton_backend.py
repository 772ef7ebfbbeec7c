"""Paged attention by the Triton kernels, planned on the device.

A step's requests that decode come first, one token each; the prefills' tokens follow:

    tokens    | d d d d d | p p p p p p p p p p | padding |
              decode_attention   prefill_attention

All lengths are read on the device, from the numbers that a step begins with (`StepTables`). Grids
are as large as the batch could need, so the same launches serve every step of a shape, and can be
captured. With `deterministic`, every token goes through the prefill kernel, whose result
does not depend on what a step computes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl.core import QKV, ModelInputs
from minisgl.kernel.triton.decode import DecodePlan, decode_attention, plan_decode
from minisgl.kernel.triton.inputs import plan_prefill
from minisgl.kernel.triton.prefill import PrefillPlan, block_tokens, prefill_attention
from minisgl.kvcache import KVPool
from minisgl.utils import div_ceil

from .fused import store_qkv

__all__ = ["StepTables", "TritonBackend", "TritonMetadata"]


class StepTables(NamedTuple):
    """What the device is told of a step of at most B requests; int32, and all on the device.

    B is the same for every step: kernels are compiled for it.
    """

    counts: torch.Tensor
    """`[3]`: requests that decode, all requests, tokens."""
    rows: torch.Tensor
    """`[B]`: each request's row of the page table."""
    cached_lens: torch.Tensor
    """`[B]`: tokens with keys and values before this step."""
    seq_lens: torch.Tensor
    """`[B]`: tokens with keys and values after it."""
    starts: torch.Tensor
    """`[B + 1]`: first token of each request in the batch."""


@dataclass(eq=False)
class TritonMetadata:
    """One step's work for the kernels."""

    tables: StepTables
    last: torch.Tensor  # [B] int64
    num_decodes: int
    """Requests that decode, or more: places whose tokens decode attention may write."""
    decode: dict[int | None, DecodePlan]
    """By window; unused if nothing decodes."""
    prefill: PrefillPlan | None
    is_low: bool
    """Whether what goes as a prefill are single tokens."""

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of each request's last token in the batch: `[bs]`, int64."""
        return self.last[:bs]


class TritonBackend:
    """Attention of one engine; `plan` once a step, then `forward_qkv` for each layer."""

    fuses_qkv = True

    def __init__(
        self,
        pool: KVPool,
        page_table: torch.Tensor,
        windows: Sequence[int | None],
        heads: int,
        max_requests: int,
    ) -> None:
        """`heads` are this rank's query heads, `windows` one entry a layer."""
        self._pool = pool
        self._page_table = page_table
        self._windows = tuple(windows)
        shape, device = pool.shape, page_table.device
        self._scale = shape.head_dim**-0.5
        sizes = heads, shape.num_kv_heads, shape.head_dim, pool.data.dtype
        self._block_tokens = {low: block_tokens(*sizes, low=low) for low in (False, True)}
        self._decode = {
            window: DecodePlan.empty(max_requests, shape.num_kv_heads, window, device)
            for window in dict.fromkeys(windows)
        }
        self._num_items = torch.zeros(1, dtype=torch.int32, device=device)

    def plan(
        self,
        tables: StepTables,
        last: torch.Tensor,
        num_tokens: int,
        num_decodes: int,
        *,
        is_prefill: bool,
    ) -> TritonMetadata:
        """Plan a step of up to `num_tokens` tokens and `num_decodes` requests that decode.

        Others only come if `is_prefill`, or if `num_decodes` is 0: then `counts[0]` must be, too.
        Launches kernels that read `tables`, and can be captured with the rest of the step.
        """
        if num_decodes:
            for plan in self._decode.values():
                plan_decode(tables.rows, tables.seq_lens, tables.counts, plan, num_decodes)
        prefill = None
        if is_prefill or not num_decodes:
            step = self._block_tokens[not is_prefill]
            most = div_ceil(num_tokens, step) + last.shape[0]
            items = torch.empty((most, 2), dtype=torch.int32, device=tables.rows.device)
            prefill = PrefillPlan(
                items, self._num_items, tables.rows, tables.starts, tables.seq_lens
            )
            plan_prefill(tables.counts, prefill, step)
        return TritonMetadata(tables, last, num_decodes, self._decode, prefill, not is_prefill)

    def forward_qkv(self, qkv: QKV, layer_id: int, batch: ModelInputs) -> torch.Tensor:
        """From the projections `[T, (Hq + 2 Hk) D]` to `[T, Hq, D]`; stores keys and values.

        Rows of padding tokens are left as they are.
        """
        return self._attend(store_qkv(self._pool, qkv, layer_id, batch), layer_id, batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ModelInputs
    ) -> torch.Tensor:
        """Unused: this backend takes the projections."""
        raise NotImplementedError("TritonBackend fuses QK-norm, RoPE and the KV store: forward_qkv")

    def _attend(self, q: torch.Tensor, layer_id: int, batch: ModelInputs) -> torch.Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TritonMetadata)
        window, count = self._windows[layer_id], metadata.num_decodes
        keys, values = self._pool.pages(layer_id)
        out = q.new_empty(q.shape)
        if count:
            decode_attention(
                q[:count],
                keys,
                values,
                self._page_table,
                metadata.decode[window],
                out[:count],
                scale=self._scale,
            )
        if metadata.prefill is not None:
            prefill_attention(
                q,
                keys,
                values,
                self._page_table,
                metadata.prefill,
                out,
                scale=self._scale,
                window=window,
                low=metadata.is_low,
            )
        return out
