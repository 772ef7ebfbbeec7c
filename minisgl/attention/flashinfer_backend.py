"""Paged attention by FlashInfer's kernels (the package flashinfer-python), planned on the host.

A step's requests that decode come first, one token each; the prefills' tokens follow. Each part is
computed by a wrapper of FlashInfer's, which is planned once a step and then run for every layer.
Layers with another sliding window need another plan, so there is a pair for each:

    tokens    | d d d d d | p p p p p p p p p p |
              decode        prefill                 pages of the parts, one request after the other:
    pages     | 0 0 1 1 1 2 | 3 3 3 4 |              its number of pages is the host's to know

FlashInfer compiles a kernel when it is first planned, which takes about a minute, and keeps it in
`~/.cache/flashinfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.core import QKV, Batch, ModelInputs
from minisgl.errors import ConfigError
from minisgl.kernel.triton.runtime import num_sms
from minisgl.kvcache import KVPool
from minisgl.utils.transfer import to_device

from .fused import store_qkv

__all__ = ["FlashInferBackend", "FlashInferMetadata"]

_HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer's prefill kernels for Hopper and those for older devices both have."""
_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""
_MAX_TILE_ROWS = 128


@dataclass(eq=False)
class FlashInferMetadata:
    """One step's work; good until the next is prepared, since the plans lie in the wrappers."""

    last: torch.Tensor  # [B] int64
    num_decodes: int
    """Requests that decode, which are as many tokens, the batch's first ones."""
    num_tokens: int

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of each request's last token in the batch: `[bs]`, int64."""
        return self.last[:bs]


class _Wrapper:
    """A wrapper of FlashInfer's that may be planned while the device is steps behind.

    FlashInfer's `plan` fills pinned memory, the same each time, and queues its copy to the device.
    There all is read and written in the stream's order; but the host would fill the memory before
    the last plan was copied. So it waits for that copy. It is at its step's beginning, and with
    overlap a step is planned when the one before has begun or is about to: the wait is short.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._copied = torch.cuda.Event()
        self.run = wrapper.run

    def plan(self, *args: Any, **options: Any) -> None:
        """FlashInfer's, once its last plan has left the pinned memory."""
        self._copied.synchronize()
        self._wrapper.plan(*args, **options)
        self._copied.record(torch.cuda.current_stream(self._device))


class _Wrappers(NamedTuple):
    """What computes the layers of one sliding window."""

    decode: _Wrapper
    prefill: _Wrapper


class FlashInferBackend:
    """Attention of one engine: `prepare_metadata` once a step, `forward_qkv` for each layer."""

    fuses_qkv = True

    def __init__(
        self, pool: KVPool, page_table: torch.Tensor, windows: Sequence[int | None], heads: int
    ) -> None:
        """`heads` are this rank's query heads, `windows` one entry a layer.

        Raises `ConfigError` if FlashInfer can't be imported or has no kernels for the head size.
        """
        shape, device = pool.shape, page_table.device
        if shape.head_dim not in _HEAD_DIMS:
            raise ConfigError(
                f"--attn flashinfer has kernels for head sizes of {', '.join(map(str, _HEAD_DIMS))}"
                f", and the model's is {shape.head_dim}: use --attn auto"
            )
        try:
            from flashinfer import (
                BatchDecodeWithPagedKVCacheWrapper,
                BatchPrefillWithPagedKVCacheWrapper,
            )
        except ImportError as error:
            raise ConfigError(
                f"--attn flashinfer: flashinfer-python can't be imported ({error}); install what "
                "it needs or use --attn auto"
            ) from error
        self._pool = pool
        self._page_table = page_table
        self._windows = tuple(windows)
        self._num_heads = heads, shape.num_kv_heads
        self._options = {
            "sm_scale": shape.head_dim**-0.5,
            "q_data_type": pool.data.dtype,
            "kv_data_type": pool.data.dtype,
        }
        size = max(
            _WORKSPACE_BYTES, _partials_bytes(heads, shape.num_kv_heads, shape.head_dim, device)
        )
        # Shared: what lies in it is read by the kernel after the one that wrote it.
        place = torch.zeros(size, dtype=torch.uint8, device=device), "NHD"
        # Tensor cores take any group of query heads, and memory is the limit anyway.
        self._wrappers = {
            window: _Wrappers(
                _Wrapper(BatchDecodeWithPagedKVCacheWrapper(*place, use_tensor_cores=True), device),
                _Wrapper(BatchPrefillWithPagedKVCacheWrapper(*place), device),
            )
            for window in dict.fromkeys(self._windows)
        }

    def prepare_metadata(self, batch: Batch) -> FlashInferMetadata:
        """Plan the batch; its requests' rows of the page table are written already."""
        size = self._pool.shape.page_size
        decodes = batch.extend_lens == 1
        # The first requests of a batch decode; another of one token is a chunk among the prefills.
        count = batch.size if decodes.all() else int(decodes.argmin())
        starts, firsts = _offsets(batch.extend_lens), _offsets(-(-batch.device_lens // size))
        pages = self._gather_pages(batch.rows, firsts)
        tails = torch.from_numpy(((batch.device_lens - 1) % size + 1).astype(np.int32))
        num_decode_pages = int(firsts[count])
        first_pages, first_tokens = torch.from_numpy(firsts), torch.from_numpy(starts)
        shape = *self._num_heads, self._pool.shape.head_dim, size
        for window, wrappers in self._wrappers.items():
            options = {"window_left": -1 if window is None else window - 1, **self._options}
            if count:
                wrappers.decode.plan(
                    first_pages[: count + 1],
                    pages[:num_decode_pages],
                    tails[:count],
                    *shape,
                    **options,
                )
            if count < batch.size:
                wrappers.prefill.plan(
                    first_tokens[count:] - count,
                    first_pages[count:] - num_decode_pages,
                    pages[num_decode_pages:],
                    tails[count:],
                    *shape,
                    causal=True,
                    **options,
                )
        last = to_device(starts[1:].astype(np.int64) - 1, self._page_table.device)
        return FlashInferMetadata(last, count, int(starts[-1]))

    def forward_qkv(self, qkv: QKV, layer_id: int, batch: ModelInputs) -> torch.Tensor:
        """From the projections `[T, (Hq + 2 Hk) D]` to `[T, Hq, D]`; stores keys and values."""
        q = store_qkv(self._pool, qkv, layer_id, batch)
        metadata = batch.attn_metadata
        assert isinstance(metadata, FlashInferMetadata)
        pages, wrappers = self._pool.pages(layer_id), self._wrappers[self._windows[layer_id]]
        count = metadata.num_decodes
        out: torch.Tensor = q.new_empty(q.shape)
        if count:
            wrappers.decode.run(q[:count], pages, out=out[:count])
        if count < metadata.num_tokens:
            wrappers.prefill.run(q[count:], pages, out=out[count:])
        return out

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ModelInputs
    ) -> torch.Tensor:
        """Unused: this backend takes the projections."""
        raise NotImplementedError("FlashInferBackend fuses what precedes attention: forward_qkv")

    def _gather_pages(self, rows: np.ndarray, firsts: np.ndarray) -> torch.Tensor:
        """All requests' pages, `[firsts[-1]]` int32 on the device.

        `rows [B]` of the page table; pages `firsts[b] .. firsts[b + 1]` are request b's. The device
        is told how many there are in all: counting them there would mean waiting for it.
        """
        device, total = self._page_table.device, int(firsts[-1])
        table = np.stack((rows, firsts[:-1], np.diff(firsts)))
        row, first, count = to_device(table, device).unbind()
        owner = torch.repeat_interleave(count, output_size=total)
        column = torch.arange(total, device=device) - first[owner]
        return self._page_table[row[owner], column]


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each stretch begins and the last one ends: `[n + 1]` int32."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _partials_bytes(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Most bytes that FlashInfer needs for partial results, float32 sums and a weight for each.

    It cuts requests' keys where their tiles of queries are too few for the device: into as many
    parts as give two blocks a multiprocessor, each with all heads. (`PrefillPlan` in scheduler.cuh,
    version 0.6.14. Its kernels for Hopper cut nothing.)
    """
    tiles = 2 * num_sms(device) // kv_heads
    return tiles * heads * _MAX_TILE_ROWS * (head_dim + 1) * torch.float32.itemsize
