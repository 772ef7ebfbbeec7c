"""FlashInfer as the attention backend: the same results as by the Triton kernels, and overlap.

FlashInfer compiles its kernels at their first use: the first run takes minutes.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention.flashinfer_backend import FlashInferBackend
from minisgl.core import QKV, Batch, PageWrites, Req, SamplingParams
from minisgl.engine import Engine
from minisgl.engine.inputs import fill_batch
from minisgl.errors import ConfigError
from minisgl.kvcache import KVPool, KVShape
from minisgl.utils import div_ceil
from tests.by_hand import PAGE, STEPS, make_requests, run
from tests.helpers import TINY, assert_close, make_engine, random_prompts, save, tiny_hf_model
from tests.kernel.paged import Paged, reference_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python isn't installed"
    ),
]

LENGTHS = [33, 1, 70, 19, 128, 50]
"""Of the prompts, in tokens."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=1).resolve_defaults({})
ATTENTION_TOLERANCE = 1.6e-2
"""As for the Triton kernels in bfloat16 (see tests/kernel/test_prefill.py)."""
WORST_LOGIT, MEAN_LOGIT = 1.0, 0.06
"""Errors of logits (standard deviation 1.6, at most 8) allowed between two backends in bfloat16.

About twice what lies between two CPU implementations, 0.43 and 0.029. A window that is off by one
gives 2.5 and 0.17 against the right one in float32; another token's logits differ by far more.
"""


def make_reqs(prompts: list[list[int]]) -> list[Req]:
    def make(row: int, ids: list[int]) -> Req:
        return Req(row, ids, len(ids), GREEDY, max_len=len(ids) + 1, row=row)

    return [make(row, ids) for row, ids in enumerate(prompts)]


def mixed_batches(reqs: list[Req], seed: int) -> list[Batch]:
    """All of the prompts in random pieces: batches that decode, prefill, or do both.

    A request's single token counts as decode where all before it do, else as a chunk.
    """
    rng, batches = random.Random(seed), []
    while live := [req for req in reqs if req.cached_len < req.prompt_len]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        for req in chosen:
            rest = req.prompt_len - req.cached_len
            req.device_len = req.cached_len + rng.choice([1, 1, min(rest, rng.randint(1, 48))])
        if rng.random() < 0.7:
            chosen.sort(key=lambda req: req.extend_len > 1)
        batches.append(Batch(chosen))
        for req in chosen:
            req.cached_len = req.device_len
    return batches


@pytest.mark.parametrize(
    ("head_dim", "windows", "heads", "page_size"),
    [(64, (None,), (4, 4), 4), (128, (None, 20), (16, 8), 16), (128, (20, None), (8, 1), 1)],
    ids=str,
)
def test_mixed_batches_equal_attention_in_float64(
    head_dim: int, windows: tuple[int | None, ...], heads: tuple[int, int], page_size: int
) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    columns = div_ceil(max(LENGTHS), page_size)
    num_pages = len(LENGTHS) * columns
    pool = KVPool(KVShape(len(windows), heads[1], head_dim, page_size), num_pages, dtype, device)
    pool.data.copy_(normal(*pool.data.shape))  # an earlier owner's
    pages = torch.randperm(num_pages, generator=generator, device=device)
    table = pages.int().view(len(LENGTHS), columns)
    backend = FlashInferBackend(pool, table, windows, heads[0])
    angles = normal(max(LENGTHS), head_dim // 2)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    tokens = torch.zeros((len(LENGTHS), max(LENGTHS)), dtype=torch.int32, device=device)
    kinds = set()
    for batch in mixed_batches(make_reqs([[0] * length for length in LENGTHS]), seed=head_dim):
        fill_batch(batch, tokens, table, page_size)
        batch.attn_metadata = metadata = backend.prepare_metadata(batch)
        extend = batch.extend_lens
        assert metadata.get_last_indices(batch.size).tolist() == (extend.cumsum() - 1).tolist()
        kinds.add((metadata.num_decodes > 0, metadata.num_decodes < batch.size))
        for layer, window in enumerate(windows):
            projected = normal(batch.num_tokens, (heads[0] + 2 * heads[1]) * head_dim).to(dtype)
            qkv = QKV(projected, *heads, head_dim, rope, None, None, 1e-6)
            out = backend.forward_qkv(qkv, layer, batch)
            q = projected[:, : heads[0] * head_dim].unflatten(1, (heads[0], head_dim))
            rows, lens = (torch.from_numpy(x) for x in (batch.rows, batch.device_lens))
            paged = Paged(*pool.pages(layer), table, rows, lens)
            exact = reference_attention(
                q, paged, extend.tolist(), scale=head_dim**-0.5, window=window
            )
            error = ((out.double() - exact).abs() / (1 + exact.abs())).max().item()
            assert error <= ATTENTION_TOLERANCE, f"layer {layer}: max error {error:.3g}"
    assert kinds == {(True, False), (False, True), (True, True)}


class AllRows:
    """A `PromptLogitsSink` that keeps the logits of every token."""

    def __init__(self, num_tokens: int) -> None:
        self.rows = torch.arange(num_tokens, device="cuda")
        self.pieces: list[torch.Tensor] = []

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        self.pieces.append(logits.float().cpu())


def all_logits(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of every token of each prompt, computed in mixed batches: `[length, vocab]` float32."""
    reqs, size = make_reqs(prompts), engine.config.page_size
    writes, free = PageWrites([], [], [], []), iter(range(1000))
    for req in reqs:
        engine.attach(req)
        for column in range(div_ceil(req.prompt_len, size)):
            page = next(free)
            for part, value in zip(writes, (req.row, column, page, page), strict=True):
                part.append(value)
    engine.set_pages(writes)
    found: list[list[torch.Tensor]] = [[] for _ in reqs]
    for batch in mixed_batches(reqs, seed=1):
        batch.prompt_logits = sink = AllRows(batch.num_tokens)
        engine.launch(batch).result()
        parts = torch.cat(sink.pieces).split(batch.extend_lens.tolist())
        for req, part in zip(batch.reqs, parts, strict=True):
            found[req.row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize(
    ("model_type", "head_dim", "changes"),
    [
        ("llama", 64, {}),
        # The first of its layers sees all, the others have a window.
        ("qwen3", 128, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    ],
)
def test_logits_equal_the_triton_kernels(
    model_type: str, head_dim: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(tiny_hf_model(model_type, head_dim=head_dim, **changes), tmp_path)
    prompts = random_prompts(LENGTHS, TINY["vocab_size"])
    found = []
    for attn in ("triton", "flashinfer"):
        engine = make_engine(
            folder, dtype="bfloat16", attn=attn, num_pages=64, max_model_len=160,
            max_running_requests=len(LENGTHS), device="cuda",
        )  # fmt: skip
        assert engine.config.attn == attn
        found.append(all_logits(engine, prompts))
        engine.close()
    theirs, ours = (torch.cat(logits) for logits in found)
    assert_close(ours, theirs, WORST_LOGIT)
    assert (ours - theirs).abs().mean() <= MEAN_LOGIT


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With room for the requests of `tests.by_hand`; its kernels are compiled and loaded."""
    folder = save(tiny_hf_model("llama", head_dim=64), tmp_path_factory.mktemp("small"))
    engine = make_engine(
        folder, dtype="bfloat16", attn="flashinfer", page_size=PAGE, num_pages=24,
        max_model_len=48, max_running_requests=3, device="cuda",
    )  # fmt: skip
    run(engine, 1)
    yield engine
    engine.close()


def busy() -> Callable[[], bool]:
    """Keep the device busy for about a second; the function tells whether it still is."""
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    event = torch.cuda.Event()
    event.record()
    return lambda: not event.query()


@pytest.mark.parametrize("most_unread", [2, STEPS])
def test_a_plan_waits_until_the_one_before_is_read(small: Engine, most_unread: int) -> None:
    expected = run(small, 1)[1]
    busy()  # so that all steps could be planned before the first one begins
    assert run(small, most_unread)[1] == expected


def test_a_prompt_is_launched_while_the_device_is_busy(small: Engine) -> None:
    req, _ = make_requests()
    req.device_len = req.prompt_len
    still_busy = busy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        small.attach(req)
        small.set_pages(PageWrites([0, 0], [0, 1], [3, 5], [3, 5]))
        step = small.launch(Batch([req]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_busy(), "the launch waited for the device"
    assert None not in step.result().token_ids


def test_other_head_sizes_are_refused() -> None:
    device = torch.device("cuda")
    pool = KVPool(KVShape(1, 2, 80, 16), 4, torch.bfloat16, device)
    table = torch.zeros((1, 4), dtype=torch.int32, device=device)
    with pytest.raises(ConfigError, match="64, 128, 256, and the model's is 80: use --attn auto"):
        FlashInferBackend(pool, table, [None], 2)
