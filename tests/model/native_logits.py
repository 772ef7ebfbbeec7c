"""Logits of whole models on the native kernels, of one request or of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minisgl.core import Batch, PageWrites, Req, SamplingParams
from minisgl.engine import Engine
from minisgl.utils import div_ceil
from tests.helpers import engine_logits, make_engine

MAX_LEN = 256


def native_engine(folder: str, **config: Any) -> Engine:
    """An engine with room for one request, unless `num_pages` says otherwise.

    It runs the native kernels, or with `kernels="reference"` doesn't.
    """
    config = {"dtype": "float32", "threads": 1, "max_model_len": MAX_LEN, **config}
    pages = div_ceil(MAX_LEN, config.get("page_size", 16))
    engine = make_engine(folder, **{"num_pages": pages, **config})
    assert engine.config.native == (config.get("kernels") != "reference")
    return engine


def logits(folder: str, ids: Sequence[int], chunk: int = MAX_LEN, **config: Any) -> torch.Tensor:
    """Of every position, `[len(ids), V]`, computed in chunks; in the configuration's type."""
    engine = native_engine(folder, **config)
    try:
        found = engine_logits(engine, ids, list(range(len(ids))), chunk)
    finally:
        engine.close()
    assert bool(found.isfinite().all())
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all logits: the rms of the error over the rms of the value."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


class _AllRows:
    """A `PromptLogitsSink` for every row of a batch."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(count)
        self.pieces: list[torch.Tensor] = []

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        self.pieces.append(logits.clone())


def batch_logits(
    engine: Engine, prompts: Sequence[Sequence[int]], prefilled: Sequence[int]
) -> list[torch.Tensor]:
    """Logits `[len(prompt), V]` of each prompt, all run as one batch.

    A first step computes `prefilled[i]` tokens of each, the second the rest.
    """
    size, params = engine.config.page_size, SamplingParams(temperature=0.0, max_tokens=1)
    each = div_ceil(MAX_LEN, size)
    reqs = []
    for row, ids in enumerate(prompts):
        pages = list(range(row * each, row * each + div_ceil(len(ids), size)))
        req = Req(
            uid=row, token_ids=list(ids), prompt_len=len(ids), max_len=len(ids) + 1, row=row,
            params=params.resolve_defaults({}), pages=pages,
        )  # fmt: skip
        engine.attach(req)
        columns = list(range(len(pages)))
        engine.set_pages(PageWrites([row] * len(pages), columns, pages, fresh=pages))
        reqs.append(req)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for lengths in (prefilled, [len(ids) for ids in prompts]):
        for req, length in zip(reqs, lengths, strict=True):
            req.device_len = length
        counts = [req.device_len - req.cached_len for req in reqs]
        batch = Batch(reqs)
        batch.prompt_logits = sink = _AllRows(sum(counts))
        engine.launch(batch).result()
        for mine, part in zip(found, torch.cat(sink.pieces).split(counts), strict=True):
            mine.append(part)
        for req in reqs:
            req.cached_len = req.device_len
    return [torch.cat(parts) for parts in found]
