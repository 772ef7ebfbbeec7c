"""Engines that compute by the Triton kernels, against the reference's on the CPU.

On a machine without CUDA the kernels are interpreted, so that models, batches and prompts are as
small as they can be with every path taken. What runs only on a GPU (captured steps, overlap with
the host) is in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import Batch, PageWrites, Req, SamplingParams, StepOutput, TokenLogprobs
from minisgl.engine import Engine
from minisgl.models.checkpoint import load_model_info
from minisgl.resolve import resolve
from minisgl.utils import div_ceil
from minisgl.utils.hardware import Hardware
from tests.by_hand import PAGE, run
from tests.helpers import LOGIT_ATOL, _Rows, assert_close, random_prompts, save, tiny_hf_model

from .conftest import DEVICE

VOCAB = 50
PROMPTS = random_prompts([13, 9, 5], VOCAB, seed=3)
HEADS = {"hidden_size": 32, "intermediate_size": 40, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "qwen2": {},  # a bias beside the projections
    "qwen3": HEADS,  # norms of queries and keys
    "mistral": {**HEADS, "sliding_window": 4},
}

Steps = Sequence[Sequence[tuple[int, int]]]
"""Batches of `(prompt, tokens)`."""
WHOLE: Steps = [[(0, 13), (1, 9), (2, 5)]]
APART: Steps = [[(0, 13)], [(1, 9)], [(2, 5)]]
MIXED: Steps = [
    [(0, 6)],
    [(0, 1), (1, 6)],  # the first of them decodes, as far as the kernels know
    [(1, 1), (0, 1)],
    [(0, 3), (1, 1), (2, 4)],  # a chunk of one token among the prefills
    [(2, 1), (1, 1), (0, 2)],
]
SINGLE: Steps = [[(2, 1)]] * 4


def save_model(kind: str, folder: Path, **changes: Any) -> str:
    """Two layers are enough for one to read what the other wrote."""
    return save(tiny_hf_model(kind, **{"num_hidden_layers": 2, **MODELS[kind], **changes}), folder)


def make_engine(path: str, *, triton: bool, deterministic: bool = False, **options: Any) -> Engine:
    """An engine in float32; where there is no CUDA, `resolve` is told otherwise."""
    common: dict[str, Any] = {
        "dtype": "float32", "max_running_requests": 3, "max_prefill_length": 40, "threads": 1,
    }  # fmt: skip
    on_gpu = triton and DEVICE.type == "cuda"
    asked = EngineConfig(
        device="cuda" if on_gpu else "cpu",
        kernels="auto" if on_gpu else "reference",
        deterministic=deterministic and on_gpu,
        **common,
        **options,
    )
    info = load_model_info(path)
    config = resolve(asked, Hardware.detect(), info.facts())
    if triton and not on_gpu:
        config = replace(config, triton=True, attn="triton", deterministic=deterministic)
    engine = Engine(path, info.config, config)
    if triton:
        assert "kernel.triton" in engine._forward.describe()
        poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """No kernel may read a slot that no token of its request was written to."""
    assert not engine._forward.reads_unused_slots
    engine._pool.data.fill_(torch.nan)


def make_requests(engine: Engine) -> list[Req]:
    """The prompts, attached, with pages and rows in no order."""
    params = SamplingParams(temperature=0.0, max_tokens=1).resolve_defaults({})
    size, writes = engine.config.page_size, PageWrites([], [], [], [])
    free = torch.randperm(engine.plan.num_pages, generator=torch.Generator().manual_seed(0))
    pages, reqs = iter(free.tolist()), []
    for i, prompt in enumerate(PROMPTS):
        req = Req(uid=i, token_ids=prompt, prompt_len=len(prompt), params=params, max_len=40)
        req.row, req.pages = 2 - i, [next(pages) for _ in range(div_ceil(len(prompt), size))]
        writes.rows.extend([req.row] * len(req.pages))
        writes.columns.extend(range(len(req.pages)))
        writes.pages.extend(req.pages)
        engine.attach(req)
        reqs.append(req)
    writes.fresh.extend(writes.pages)
    engine.set_pages(writes)
    return reqs


def logits(engine: Engine, steps: Steps) -> list[torch.Tensor]:
    """Those of every token that the steps compute, by prompt: `[n, V]` each, on the CPU."""
    reqs = make_requests(engine)
    found: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    for step in steps:
        for i, count in step:
            reqs[i].device_len = reqs[i].cached_len + count
        batch = Batch([reqs[i] for i, _ in step])
        batch.prompt_logits = sink = _Rows([*range(batch.num_tokens)])
        sink.rows = sink.rows.to(engine.config.device)
        output = engine.launch(batch).result()
        computed = torch.cat(sink.pieces).cpu().split(batch.extend_lens.tolist())
        for (i, _), own, token in zip(step, computed, output.token_ids, strict=True):
            found[i].append(own)
            reqs[i].cached_len = reqs[i].device_len
            ended = reqs[i].cached_len == len(PROMPTS[i])
            assert token == (own[-1].argmax().item() if ended else None)
    return [torch.cat(own) if own else torch.empty(0, VOCAB) for own in found]


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [("llama", 1), ("qwen2", 16), ("qwen3", 16), ("mistral", 1), ("mistral", 16)],
)
def test_logits_are_the_reference_s(kind, page_size, tmp_path) -> None:
    path = save_model(kind, tmp_path, vocab_size=VOCAB)
    options = {"page_size": page_size, "num_pages": 32, "max_model_len": 16}
    expected = logits(make_engine(path, triton=False, **options), APART)
    engine = make_engine(path, triton=True, **options)
    for steps in (WHOLE, MIXED):
        for ours, theirs in zip(logits(engine, steps), expected, strict=True):
            assert_close(ours, theirs, LOGIT_ATOL, kind)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_deterministic_logits_depend_on_nothing_else(kind, tmp_path) -> None:
    """Chunks, other requests, and tokens one by one: the same bits."""
    layers = 2 if kind == "qwen3" else 1
    path = save_model(kind, tmp_path, vocab_size=VOCAB, num_hidden_layers=layers)
    options = {"page_size": 4, "num_pages": 12, "max_model_len": 16}
    engine = make_engine(path, triton=True, deterministic=True, **options)
    assert "linear: kernel.triton.gemm" in engine._forward.describe()
    expected = logits(engine, APART)
    theirs = logits(make_engine(path, triton=False, **options), APART)
    for ours, other in zip(expected, theirs, strict=True):
        assert_close(ours, other, LOGIT_ATOL, kind)
    for steps in (MIXED, SINGLE):
        for ours, whole in zip(logits(engine, steps), expected, strict=True):
            assert torch.equal(ours, whole[: len(ours)])


class Run(NamedTuple):
    """What `by_hand.run` gave."""

    reqs: list[Req]
    outputs: list[StepOutput]

    @property
    def tokens(self) -> list[list[int]]:
        return [req.token_ids for req in self.reqs]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        found = [entry for output in self.outputs for entry in output.logprobs or ()]
        for output in self.outputs:
            found += [entry for entries in output.prompt_logprobs or () for entry in entries]
        return [entry for entry in found if entry is not None]


def test_generates_the_reference_s_tokens(tmp_path) -> None:
    """A greedy request, and one with a seed, filters, penalties, a bias and bans."""
    path = save_model("qwen2", tmp_path, num_hidden_layers=1)
    options = {"page_size": PAGE, "num_pages": 24, "max_model_len": 48}
    reference = Run(*run(make_engine(path, triton=False, **options), 1))
    engine = make_engine(path, triton=True, **options)
    found = Run(*run(engine, 1))
    assert found.tokens == reference.tokens
    assert len(found.logprobs) == len(reference.logprobs)
    for ours, theirs in zip(found.logprobs, reference.logprobs, strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        # As for logits; log-softmax adds at most as much again.
        assert ours.logprob == pytest.approx(theirs.logprob, abs=2 * LOGIT_ATOL)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
