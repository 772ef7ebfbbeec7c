"""Captured steps: the launches of a forward, recorded once and replayed as one.

A step of 28 layers is some 300 launches, which take the host longer than the device when the batch
is small. A graph has a fixed shape, so a step runs in the smallest one that holds it, and kernels
skip what is padding:

    decode   1 2 4 8 16 24 32 48 64 ...    requests, one token each
    mixed    64 128 ... 2048               tokens of decodes and prefill chunks together

All graphs share one memory pool, the largest captured first: their buffers overlap, since one step
ends before the next begins. Logits go to memory of the caller's, or each graph would keep its own.
"""

from __future__ import annotations

import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = ["CudaGraphs", "Shape", "graph_shapes"]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are captured: always the same, as libraries keep workspaces for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor that the garbage collector finds while a graph is captured would be an error."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_MIXED_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Larger steps keep the device busy for longer than the host needs to launch them."""


class Shape(NamedTuple):
    """What a forward has room for."""

    num_tokens: int
    num_reqs: int
    num_decodes: int
    """Requests that may decode; equal to `num_tokens` if all do, 0 if all go as prefills."""
    is_prefill: bool


def graph_shapes(max_bs: int, max_reqs: int, max_tokens: int, deterministic: bool) -> list[Shape]:
    """The shapes to capture, for decode batches up to `max_bs` (0: none at all)."""
    if max_bs == 0:
        return []
    sizes = [
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(640, max_bs, 128),
    ]
    sizes = sorted({*(size for size in sizes if size < max_bs), max_bs})
    shapes = [Shape(size, size, 0 if deterministic else size, False) for size in sizes]
    for tokens in _MIXED_TOKENS:
        if tokens <= max_tokens:
            reqs = min(tokens, max_reqs)
            shapes.append(Shape(tokens, reqs, 0 if deterministic else reqs, True))
    return shapes


class CudaGraphs:
    """The captured forwards of one engine."""

    def __init__(
        self,
        compute: Callable[[Shape], torch.Tensor],
        shapes: Sequence[Shape],
        device: torch.device,
    ) -> None:
        """Capture `compute` for each of `shapes`; it must only launch work, and read what
        changes from step to step from memory that stays where it is."""
        self._outputs: dict[Shape, torch.Tensor] = {}
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._decode = sorted(shape for shape in shapes if not shape.is_prefill)
        self._mixed = sorted(shape for shape in shapes if shape.is_prefill)
        if not shapes:
            return
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(_stream(device)), _no_collection():
            for shape in sorted(shapes, reverse=True):
                compute(shape)  # compiles kernels, which can't be captured
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._outputs[shape] = compute(shape)
                finally:
                    graph.capture_end()
                self._graphs[shape] = graph
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the runs before the captures took

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, num_tokens: int, num_reqs: int, is_prefill: bool) -> Shape | None:
        """The smallest captured shape for such a step, None if there is none."""
        shapes = self._mixed if is_prefill else self._decode
        i = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        if i == len(shapes) or shapes[i].num_reqs < num_reqs:
            return None
        return shapes[i]

    def replay(self, shape: Shape) -> torch.Tensor:
        """Launch the step; what it returns is overwritten by the next replay of any shape."""
        self._graphs[shape].replay()
        return self._outputs[shape]
