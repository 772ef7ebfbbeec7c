"""Requests for the steps that memory is measured on: as large as steps get, every option on."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core import PageWrites, Req, SamplingParams
from minisgl.utils import div_ceil

__all__ = ["page_writes", "profile_requests"]

_PARAMS = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=20,
)


def profile_requests(count: int, length: int, page_size: int) -> list[Req]:
    """Requests of `length` tokens, which compute their last `length` (a prompt) or, of 2, the
    second one (a decode)."""
    params = _PARAMS.resolve_defaults({})
    each = div_ceil(length, page_size)
    return [
        Req(
            uid=row,
            token_ids=[0] * length,
            prompt_len=length,
            params=params,
            max_len=length + 1,
            row=row,
            pages=list(range(row * each, (row + 1) * each)),
            cached_len=1 if length == 2 else 0,
            device_len=length,
        )
        for row in range(count)
    ]


def page_writes(reqs: Sequence[Req]) -> PageWrites:
    """All their pages, as new ones."""
    writes = PageWrites([], [], [], [])
    for req in reqs:
        writes.rows.extend([req.row] * len(req.pages))
        writes.columns.extend(range(len(req.pages)))
        writes.pages.extend(req.pages)
    writes.fresh.extend(writes.pages)
    return writes
