"""Requests for the steps that memory is measured on, and for compiling the sampler."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.config import ResolvedConfig
from minisgl.core import PageWrites, Req, SamplingParams
from minisgl.utils import div_ceil

__all__ = ["page_writes", "profile_batches", "sampling_requests"]

_PARAMS = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=20,
    prompt_logprobs=1,
)


def profile_batches(config: ResolvedConfig) -> list[list[Req]]:
    """The batches that need most: whole prompts, as many requests as can be, all that decode.

    The plain backend gathers what a chunk sees, so there a prompt's last chunk needs most.
    """
    budget, most = config.max_prefill_length, config.max_running_requests
    length = min(budget, config.max_model_len)
    batches = [
        _requests(min(budget // length, most), length, 0, config.page_size),
        _requests(most, min(budget // most, length), 0, config.page_size),
        _requests(most, 2, 1, config.page_size),
    ]
    if config.attn == "torch":
        # Its earlier pages are one and the same: a pool for all of them isn't there yet.
        whole = config.max_model_len
        [late] = _requests(1, whole, max(1, whole - budget), config.page_size)
        late.pages = [page % len(batches[0][0].pages) for page in late.pages]
        batches.append([late])
    return batches


def _requests(count: int, length: int, cached: int, page_size: int) -> list[Req]:
    """Requests of `length` tokens, which compute all but the first `cached` of them."""
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
            cached_len=cached,
            device_len=length,
        )
        for row in range(count)
    ]


def sampling_requests() -> list[Req]:
    """Requests of one token for each way of sampling that takes kernels of its own."""
    ways = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(temperature=1.0, presence_penalty=0.1),
        SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1),
    )
    return [
        Req(
            uid=i,
            token_ids=[0],
            prompt_len=1,
            params=params.resolve_defaults({}),
            max_len=2,
            row=0,
            device_len=1,
        )
        for i, params in enumerate(ways)
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
