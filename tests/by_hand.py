"""Requests moved on by hand as a scheduler would, so that an engine is tested without one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.core import Batch, Executor, PageWrites, PendingStep, Req, SamplingParams, StepOutput
from minisgl.engine import Engine
from minisgl.utils import div_ceil
from tests.helpers import TINY, make_engine, random_prompts, save, tiny_hf_model

STEPS, CHUNK, PAGE = 9, 6, 4
MIN_TOKENS = 4
EVEN = frozenset(range(0, TINY["vocab_size"], 2))
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=7, presence_penalty=1.5, frequency_penalty=0.5,
    repetition_penalty=1.3, min_tokens=MIN_TOKENS, max_tokens=40, logprobs=3, prompt_logprobs=2,
    logit_bias={5: 2.0},
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def tiny_engine(folder: Path, **config: Any) -> Engine:
    """An engine with random weights and room for the requests below."""
    return make_engine(
        save(tiny_hf_model("qwen2"), folder),
        dtype="float32",
        page_size=PAGE,
        num_pages=24,
        max_model_len=48,
        max_running_requests=3,
        **config,
    )


def make_requests() -> list[Req]:
    """A greedy one whose prompt is one chunk, and a sampled one whose prompt takes three.

    Every even id is an EOS of the sampled one, so that `min_tokens` bans half of the vocabulary.
    """
    prompts = random_prompts([CHUNK, 2 * CHUNK + 3], TINY["vocab_size"], seed=1)
    return [
        Req(
            uid=row,
            token_ids=prompt,
            prompt_len=len(prompt),
            params=params.resolve_defaults({}),
            max_len=48,
            seed=7,
            eos_ids=EVEN,
            row=row,
        )
        for row, (prompt, params) in enumerate(zip(prompts, (GREEDY, SEEDED), strict=True))
    ]


def grow(executor: Executor, reqs: Sequence[Req], free: list[int]) -> None:
    """Give each request the pages for its next step."""
    writes = PageWrites([], [], [], [])
    for req in reqs:
        while len(req.pages) < div_ceil(req.device_len, PAGE):
            page = free.pop()
            writes.rows.append(req.row)
            writes.columns.append(len(req.pages))
            writes.pages.append(page)
            writes.fresh.append(page)
            req.pages.append(page)
    if writes.rows:
        executor.set_pages(writes)
    for part in writes:
        part.clear()  # an executor has taken what it needs


def run(executor: Executor, most_unread: int) -> tuple[list[Req], list[StepOutput]]:
    """`STEPS` steps of all requests, with up to so many launched and not read."""
    reqs, free, outputs = make_requests(), list(range(24)), []
    unread: deque[tuple[PendingStep, list[bool]]] = deque()

    def read() -> None:
        step, sampled = unread.popleft()
        outputs.append(step.result())
        for i, req in enumerate(reqs):
            req.num_in_flight -= 1
            req.num_prompt_logprobs += len(outputs[-1].prompt_logprobs[i])
            token = outputs[-1].token_ids[i]
            assert (token is not None) == sampled[i]
            if token is not None:
                req.num_pending -= 1
                req.token_ids.append(token)

    for req in reqs:
        executor.attach(req)
    for _ in range(STEPS):
        for req in reqs:
            req.device_len = min(req.cached_len + CHUNK, req.num_tokens)
        grow(executor, reqs, free)
        sampled = [req.samples for req in reqs]
        unread.append((executor.launch(Batch(reqs)), sampled))
        for req, samples in zip(reqs, sampled, strict=True):
            req.cached_len = req.device_len
            req.num_pending += samples
            req.num_in_flight += 1
        if len(unread) == most_unread:
            read()
    while unread:
        read()
    return reqs, outputs
