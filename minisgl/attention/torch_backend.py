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
from dataclasses import dataclass, field

import torch

from minisgl.core import Batch
from minisgl.kernel import store_kv
from minisgl.kernel.torch_attention import decode_attention, prefill_attention
from minisgl.kvcache import KVPool
from minisgl.utils import div_ceil

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
    decodes: list[_Decode] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)


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

    def __init__(
        self, pool: KVPool, page_table: torch.Tensor, windows: Sequence[int | None]
    ) -> None:
        """`page_table [rows, max_pages]` int32 is the engine's; `windows` is one entry a layer."""
        self._pool = pool
        self._page_table = page_table
        self._windows = tuple(windows)
        self._page_size = pool.shape.page_size

    def prepare_metadata(self, batch: Batch) -> TorchMetadata:
        """Plan the batch; its requests' rows of the page table are written already."""
        device = self._page_table.device
        extends = [req.extend_len for req in batch.reqs]
        ends = [0]
        for extend in extends:
            ends.append(ends[-1] + extend)
        width = div_ceil(max(req.device_len for req in batch.reqs), self._page_size)
        rows = torch.tensor([req.row for req in batch.reqs], device=device)
        table = self._page_table[rows, :width].long()
        plans = {w: self._plan(batch, ends, table, w) for w in dict.fromkeys(self._windows)}
        return TorchMetadata(
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(
                [req.device_len for req in batch.reqs], dtype=torch.int32, device=device
            ),
            page_table=table,
            plans=plans,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
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
                own_k = _gather(keys, chunk.pages, chunk.length)
                own_v = _gather(values, chunk.pages, chunk.length)
            out[rows] = prefill_attention(q[rows], own_k, own_v, chunk.mask)
        return out

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Decode
    ) -> torch.Tensor:
        shape = (q.shape[0], -1, *keys.shape[2:])
        k = keys.index_select(0, group.pages).view(shape)[:, : group.length]
        v = values.index_select(0, group.pages).view(shape)[:, : group.length]
        return decode_attention(q, k, v, group.mask)

    def _plan(
        self, batch: Batch, ends: list[int], table: torch.Tensor, window: int | None
    ) -> _Plan:
        plan = _Plan()
        spans: list[tuple[int, int]] = []  # (keys read, place in the batch) of those that decode
        for i, req in enumerate(batch.reqs):
            if req.extend_len == 1:
                first = self._first_page(req.device_len - 1, window)
                spans.append((req.device_len - first * self._page_size, i))
            else:
                plan.chunks.append(self._chunk(batch, i, ends, table, window))
        for members in _buckets(spans):
            plan.decodes.append(self._bucket(batch, members, ends, table, window))
        return plan

    def _first_page(self, position: int, window: int | None) -> int:
        """Page of the first key that the token at `position` sees."""
        return 0 if window is None else max(0, position + 1 - window) // self._page_size

    def _bucket(
        self,
        batch: Batch,
        members: list[int],
        ends: list[int],
        table: torch.Tensor,
        window: int | None,
    ) -> _Decode:
        device, size = table.device, self._page_size
        lengths = [batch.reqs[i].device_len for i in members]
        firsts = [self._first_page(n - 1, window) for n in lengths]
        count = max(div_ceil(n, size) - first for n, first in zip(lengths, firsts, strict=True))
        base = torch.tensor(firsts, device=device)
        columns = base[:, None] + torch.arange(count, device=device)  # [b, count]
        rows = torch.tensor(members, device=device)[:, None]
        # Columns past a request's own pages are masked below; the dummy page has zeros there.
        own_pages = torch.tensor([div_ceil(n, size) for n in lengths], device=device)[:, None]
        pages = table[rows, columns.clamp(max=table.shape[1] - 1)]
        pages = pages.where(columns < own_pages, self._pool.dummy_page)
        length = max(n - first * size for n, first in zip(lengths, firsts, strict=True))
        mask = None
        if window is not None or min(lengths) != max(lengths):
            own = torch.tensor(lengths, device=device)[:, None] - 1
            keys = base[:, None] * size + torch.arange(length, device=device)
            mask = self._mask(own, keys, window)[:, None, None]
        tokens = torch.tensor([ends[i] for i in members], device=device)
        return _Decode(tokens, pages.flatten(), length, mask)

    def _chunk(
        self, batch: Batch, i: int, ends: list[int], table: torch.Tensor, window: int | None
    ) -> _Chunk:
        req, device = batch.reqs[i], table.device
        start, end = ends[i], ends[i + 1]
        if req.cached_len == 0 and (window is None or req.device_len <= window):
            return _Chunk(start, end)
        first = self._first_page(req.cached_len, window)
        length = req.device_len - first * self._page_size
        own = torch.arange(req.cached_len, req.device_len, device=device)[:, None]
        keys = first * self._page_size + torch.arange(length, device=device)
        pages = table[i, first : div_ceil(req.device_len, self._page_size)]
        return _Chunk(start, end, pages, length, self._mask(own, keys, window))

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


def _gather(pages: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens `[length, Hk, D]` of the pages in this order."""
    return pages.index_select(0, indices).flatten(0, 1)[:length]
