"""Paged attention with plain torch ops, on any device.

A batch has requests that decode (one token each) and prefill chunks. They are planned once a
step for each sliding window that the model has:

    decode     in buckets of similar length; a bucket gathers its pages into [b, L, Hk, D]
               and masks the tails
    first chunk   of a prompt: its keys are all in the batch; causal, nothing gathered
    later chunks  gather the request's pages and mask what lies after (or too far before)

    keys       | before the window | first key ......... own token | tail of the last page |
    mask       | -inf              | 0                              | -inf                  |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import QKV, Batch, ModelInputs
from minisgl.kernel import store_kv
from minisgl.kernel.torch_attention import decode_attention, prefill_attention
from minisgl.kvcache import KVPool
from minisgl.utils import div_ceil
from minisgl.utils.transfer import to_device

__all__ = ["TorchBackend", "TorchMetadata"]

_KEYS_PER_CALL = 512
"""Keys that are gathered and attended in the time a call takes anyway (see docs/log.md)."""


@dataclass(eq=False)
class _Decode:
    """Requests of one bucket: their tokens in the batch and the pages they read."""

    tokens: torch.Tensor  # [b] int64
    pages: torch.Tensor  # [b * P] int64
    length: int  # keys to keep of the P * page_size gathered
    mask: torch.Tensor | None  # [b, 1, 1, length]


@dataclass(eq=False)
class _Chunk:
    """One request's prefill chunk; `pages` is None for the first chunk of a prompt."""

    start: int
    end: int
    pages: torch.Tensor | None = None  # [P] int64
    length: int = 0
    mask: torch.Tensor | None = None  # [end - start, length]


@dataclass(eq=False)
class _Plan:
    decodes: list[_Decode]
    chunks: list[_Chunk]


@dataclass(eq=False)
class TorchMetadata:
    """Lengths and tables of a batch on the device, and the plan for each window.

    `cu_seqlens_q [B + 1]` and `seq_lens [B]` are int32: cumulative tokens in the batch, and
    keys of each request after this step. `page_table [B, P]` are the requests' rows. This
    backend reads its plans; a kernel would read the tables.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    plans: dict[int | None, _Plan]

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of each request's last token in the batch: `[bs]`, int64."""
        return self.cu_seqlens_q[1 : bs + 1].long() - 1


class TorchBackend:
    """The reference backend; see the module's docstring for its plan of a step."""

    fuses_qkv = False

    def __init__(
        self, pool: KVPool, page_table: torch.Tensor, windows: Sequence[int | None]
    ) -> None:
        """`page_table [rows, max_pages]` int32 is the engine's; `windows` is one entry a layer."""
        self._pool = pool
        self._page_table = page_table
        self._windows = tuple(windows)
        self._page_size = pool.shape.page_size
        self._gathered = _Gathered(), _Gathered()  # keys, values

    def prepare_metadata(self, batch: Batch) -> TorchMetadata:
        """Plan the batch; its requests' rows of the page table are written already."""
        device = self._page_table.device
        ends = np.cumsum([0, *batch.extend_lens])
        width = div_ceil(int(batch.device_lens.max()), self._page_size)
        table = self._page_table[to_device(batch.rows, device), :width].long()
        return TorchMetadata(
            cu_seqlens_q=to_device(ends.astype(np.int32), device),
            seq_lens=to_device(batch.device_lens.astype(np.int32), device),
            page_table=table,
            plans={w: self._plan(batch, ends, table, w) for w in dict.fromkeys(self._windows)},
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ModelInputs
    ) -> torch.Tensor:
        """`q [T, Hq, D]`, `k, v [T, Hk, D]` to `[T, Hq, D]`; stores k and v on the way."""
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchMetadata)
        store_kv(*self._pool.slots(layer_id), k, v, batch.out_loc)
        keys, values = self._pool.pages(layer_id)
        plan = metadata.plans[self._windows[layer_id]]
        if len(plan.decodes) == 1 and not plan.chunks:  # all requests, in the batch's order
            return self._decode(q, keys, values, plan.decodes[0])
        out = torch.empty_like(q)
        for group in plan.decodes:
            out[group.tokens] = self._decode(q[group.tokens], keys, values, group)
        for chunk in plan.chunks:
            rows = slice(chunk.start, chunk.end)
            own_k, own_v = k[rows], v[rows]
            if chunk.pages is not None:
                own_k, own_v = (
                    gathered.take(pages, chunk.pages).flatten(0, 1)[: chunk.length]
                    for gathered, pages in zip(self._gathered, (keys, values), strict=True)
                )
            out[rows] = prefill_attention(q[rows], own_k, own_v, chunk.mask)
        return out

    def forward_qkv(self, qkv: QKV, layer_id: int, batch: ModelInputs) -> torch.Tensor:
        """Not there: the layer computes QK-norm and RoPE by the ops."""
        raise NotImplementedError("TorchBackend takes q, k and v: forward")

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Decode
    ) -> torch.Tensor:
        shape = (q.shape[0], -1, *keys.shape[2:])
        k, v = (
            gathered.take(pages, group.pages).view(shape)[:, : group.length]
            for gathered, pages in zip(self._gathered, (keys, values), strict=True)
        )
        return decode_attention(q, k, v, group.mask)

    def _plan(
        self, batch: Batch, ends: np.ndarray, table: torch.Tensor, window: int | None
    ) -> _Plan:
        cached, lengths = batch.cached_lens, batch.device_lens
        # Of a request's tokens in the step, the first one, at `cached`, sees furthest back.
        seen = np.zeros_like(cached) if window is None else np.maximum(0, cached + 1 - window)
        firsts = seen // self._page_size
        # Place in the batch, first token there and in the sequence, keys, first page: [5, B].
        spans = np.stack((np.arange(batch.size), ends[:-1], cached, lengths, firsts))
        prefills = np.flatnonzero(batch.extend_lens > 1)
        decodes = np.flatnonzero(batch.extend_lens == 1)
        keys = (lengths - firsts * self._page_size)[decodes]
        buckets = _buckets(list(zip(keys.tolist(), decodes.tolist(), strict=True)))
        return _Plan(
            decodes=[self._bucket(spans[:, members], table, window) for members in buckets],
            chunks=[self._chunk(spans[:, i], table, window) for i in prefills],
        )

    def _bucket(self, spans: np.ndarray, table: torch.Tensor, window: int | None) -> _Decode:
        """The requests of `spans [5, b]` in one call."""
        device, size = table.device, self._page_size
        _, _, _, lengths, firsts = spans
        count = int((-(-lengths // size) - firsts).max())
        length = int((lengths - firsts * size).max())
        place, token, own, end, first = to_device(spans, device).unsqueeze(2).unbind()  # [b, 1]
        columns = first + torch.arange(count, device=device)  # [b, count]
        # Columns past a request's own pages are masked below; the dummy page has zeros there.
        pages = table[place, columns.clamp(max=table.shape[1] - 1)]
        pages = pages.where(columns * size < end, self._pool.dummy_page)
        mask = None
        if window is not None or lengths.min() != lengths.max():
            keys = first * size + torch.arange(length, device=device)
            mask = self._mask(own, keys, window)[:, None, None]
        return _Decode(token.flatten(), pages.flatten(), length, mask)

    def _chunk(self, span: np.ndarray, table: torch.Tensor, window: int | None) -> _Chunk:
        """The request of `span [5]`."""
        device, size = table.device, self._page_size
        place, start, cached, end, first = span.tolist()
        stop = start + end - cached
        if cached == 0 and (window is None or end <= window):
            return _Chunk(start, stop)
        length = end - first * size
        own = torch.arange(cached, end, device=device)[:, None]
        keys = first * size + torch.arange(length, device=device)
        pages = table[place, first : div_ceil(end, size)]
        return _Chunk(start, stop, pages, length, self._mask(own, keys, window))

    def _mask(self, own: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """0 where the token at `own` sees the key at `keys`, else -inf; broadcast together."""
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        mask = torch.zeros(hidden.shape, dtype=self._pool.data.dtype, device=own.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _buckets(spans: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Split `(keys, place)` into buckets that are gathered and attended in one call each.

    A bucket is padded to its longest member, so they are taken longest first, and a new bucket
    begins where the keys of padding it saves all that are left cost more than one more call.
    """
    spans = sorted(spans, reverse=True)
    start = 0
    for i in range(1, len(spans) + 1):
        if i < len(spans):
            saved = (spans[start][0] - spans[i][0]) * (len(spans) - i)
            if saved <= _KEYS_PER_CALL:
                continue
        yield sorted(place for _, place in spans[start:i])  # in the batch's order
        start = i


class _Gathered:
    """Where gathered pages lie until the next gather, of any layer.

    On a CPU this is the same memory each time: fresh memory is given page by page as it is
    touched, which takes four times as long as the copy. A GPU's memory comes from torch's cache.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, pages: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The pages `[n, page_size, Hk, D]` in the order of `indices [n]`."""
        if pages.is_cuda:
            return pages.index_select(0, indices)
        count = indices.shape[0]
        if self._buffer is None or self._buffer.shape[0] < count:
            # Sequences grow by a page now and then: half as much again makes that rare.
            self._buffer = pages.new_empty((count + count // 2, *pages.shape[1:]))
        return torch.index_select(pages, 0, indices, out=self._buffer[:count])
