"""Requests whose results must not depend on what runs beside them, and their comparison.

Token ids are compared exactly. So are logprobs where the native kernels compute, bit for bit.
Otherwise they are compared to a tolerance: a GEMM library sums a row in another order when the
batch has another size. The tokens could only differ where two logits, or a uniform number and a
border of the distribution, lie within that error; the seeds below have no such place (one that
had would fail every time, not now and then).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minisgl import LLM, RequestOutput, SamplingParams
from minisgl.core import Executor, TokenLogprobs
from minisgl.kernel.cpu import has_native
from minisgl.kvcache import CACHES
from minisgl.scheduler import Limits, Scheduler, Stats
from tests.helpers import TINY, random_prompts, save, tiny_hf_model
from tests.late_executor import LateExecutor
from tests.unit.fake_executor import ReuseGuard

LOGPROB_ATOL = 1e-4
"""As for logits (see `tests.helpers.LOGIT_ATOL`); log-softmax adds at most as much again."""
NUM_PROMPTS = 64
MAX_TOKENS = 24
# Of 1 to 40 tokens: shorter and longer than chunks (16), pages (16) and the window (9).
_OWN = random_prompts([1 + (7 * i) % 40 for i in range(NUM_PROMPTS)], TINY["vocab_size"], 11)
_SHARED = random_prompts([37, 18], TINY["vocab_size"], 12)
# Two of four begin with one of two texts, of other lengths than a whole number of pages.
PROMPTS = [_SHARED[i // 4 % 2] + own if i % 4 >= 2 else own for i, own in enumerate(_OWN)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
}  # fmt: skip
FLOAT32: dict[str, Any] = {"dtype": "float32"}
REFERENCE: dict[str, Any] = {"dtype": "float32", "kernels": "reference"}
ROUNDED: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8-keys": {"dtype": "float32", "kv_dtype": "int8"},
    "deterministic": {
        "dtype": "bfloat16", "quantization": "int4", "kv_dtype": "int8", "deterministic": True,
    },
}  # fmt: skip
"""What else the native kernels compute in."""
PAGES = 448
"""Of 16 tokens: enough for all 64 requests at once (at most 101 tokens each)."""

MATRIX = list(
    itertools.product((1, 16), (16, 4096), ("radix", "naive"), (False, True), (False, True))
)
"""Page size, token budget, cache, retraction forced, overlap."""


def params(i: int) -> SamplingParams:
    """Even prompts greedy, odd ones sampled with a seed of their own; some with logprobs,
    penalties, and an end before `max_tokens`."""
    common: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": 3 if i % 3 == 0 else None,
        "prompt_logprobs": 2 if i % 8 == 0 else None,
    }
    if i % 5 == 0:
        common |= {"presence_penalty": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    if i % 7 == 0:  # an eighth of the vocabulary ends it, once there are three tokens
        common |= {"stop_token_ids": [*range(0, TINY["vocab_size"], 8)], "min_tokens": 3}
    if i % 2 == 0:
        return SamplingParams(temperature=0.0, **common)
    return SamplingParams(temperature=0.8, top_p=0.9, seed=1000 + i, **common)


class Model(NamedTuple):
    """A saved model and what its requests give one by one, in the types of `config`, with
    everything else at its default."""

    folder: str
    config: dict[str, Any]
    native: bool
    """Which kernels that took."""
    alone: list[RequestOutput]


def make_model(name: str, folder: Path, config: dict[str, Any] = FLOAT32) -> Model:
    """Save a random model and run each request alone, without a prefix cache."""
    model_type, changes = MODELS[name]
    save(tiny_hf_model(model_type, seed=4, num_hidden_layers=2, **changes), folder)
    with LLM(folder, threads=1, num_pages=64, cache="naive", device="cpu", **config) as llm:
        native = llm.engine.config.native
        assert native == (has_native() and config.get("kernels") != "reference")
        alone = [
            llm.generate(prompt, params(i), use_tqdm=False)[0] for i, prompt in enumerate(PROMPTS)
        ]
    return Model(str(folder), config, native, alone)


def run_all(llm: LLM) -> list[RequestOutput]:
    """All prompts together."""
    each = [params(i) for i in range(NUM_PROMPTS)]
    return llm.generate(PROMPTS, each, use_tqdm=False)


def check(model: Model, **config: Any) -> Stats:
    """All prompts together give what each gave alone; returns what the scheduler counted."""
    with LLM(model.folder, threads=1, **{**model.config, **config}) as llm:
        assert llm.engine.config.native == model.native
        outputs, stats = run_all(llm), llm.scheduler.stats
    assert_same(outputs, model.alone, exact=model.native)
    return stats


def assert_same_logprobs(x: TokenLogprobs, y: TokenLogprobs) -> None:
    """Equal up to the tolerance; two tokens that tie within it may have changed places."""
    assert x.token_id == y.token_id
    assert abs(x.rank - y.rank) <= 1
    assert len(x.top) == len(y.top)
    values = [x.logprob, *(value for _, value in x.top)]
    expected = [y.logprob, *(value for _, value in y.top)]
    assert values == pytest.approx(expected, abs=LOGPROB_ATOL, rel=0)
    top = dict(y.top)
    for token, value in x.top:
        assert value == pytest.approx(top.get(token, y.top[-1][1]), abs=LOGPROB_ATOL, rel=0)


def assert_same(ours: list[RequestOutput], theirs: list[RequestOutput], *, exact: bool) -> None:
    """Equal ids, and logprobs of the same tokens: `exact`, or within the tolerance."""
    assert len(ours) == len(theirs) == NUM_PROMPTS
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.token_ids == b.token_ids, f"prompt {i}"
        assert a.finish_reason == b.finish_reason
        assert len(a.token_ids) == MAX_TOKENS or (i % 7 == 0 and a.finish_reason == "stop")
        for mine, other, count in (
            (a.logprobs, b.logprobs, len(a.token_ids) if i % 3 == 0 else None),
            (a.prompt_logprobs, b.prompt_logprobs, len(PROMPTS[i]) if i % 8 == 0 else None),
        ):
            assert (mine is None) == (other is None) == (count is None)
            if mine is None or other is None:
                continue
            assert len(mine) == len(other) == count, f"prompt {i}"
            if exact:
                assert mine == other, f"prompt {i}"
                continue
            for x, y in zip(mine, other, strict=True):
                if x is None or y is None:  # a prompt's first token has no logprob
                    assert x is y
                    continue
                assert_same_logprobs(x, y)


def check_cell(
    model: Model,
    page_size: int,
    budget: int,
    cache: str,
    retraction: bool,
    overlap: bool,
    *,
    device: str = "cpu",
) -> None:
    """One combination of everything that must not matter.

    With overlap, a CPU computes as late as an asynchronous device ever could: see `LateExecutor`.
    """
    tokens = 256 if retraction else 16 * PAGES
    num_pages, rows = tokens // page_size, min(24, budget)
    with LLM(
        model.folder, threads=1, page_size=page_size, num_pages=num_pages,
        max_running_requests=rows, max_prefill_length=budget, device=device, **model.config,
    ) as llm:  # fmt: skip
        native = llm.engine.config.native
        assert native == (model.native and device == "cpu")
        late = overlap and device == "cpu"
        executor: Executor = LateExecutor(llm.engine) if late else llm.engine
        pages = CACHES[cache](num_pages, page_size)
        guard = ReuseGuard(executor, lambda page: page in set(pages.cached_pages()))
        llm.scheduler = Scheduler(
            guard,
            pages,
            Limits(rows, budget, llm.max_model_len),
            overlap=overlap,
        )
        outputs = run_all(llm)
        while llm.scheduler.has_work:
            llm.scheduler.step()
        llm.scheduler.check_integrity()
        stats = llm.scheduler.stats
    assert_same(outputs, model.alone, exact=native)
    assert (stats.num_retractions > 0) == retraction
    assert (stats.num_hit_tokens > 0) == (cache == "radix")
    assert (stats.num_discarded_tokens > 0) == overlap
    assert guard.most_unread == (2 if overlap else 1)
