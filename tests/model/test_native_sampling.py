"""Requests with seeds get the same tokens from the native kernels as from the reference, alone and
in a batch; in float32, where logits differ by so little that no draw of these falls between."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.kernel.cpu.sample import NativeDrawer
from tests.helpers import TINY, random_prompts, save, tiny_hf_model

PROMPTS = random_prompts([3, 17, 30, 5, 9, 40, 2, 21], TINY["vocab_size"], seed=41)
MAX_TOKENS = 30
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 50},
    {"temperature": 1.3, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.8, "min_p": 0.005, "logprobs": 2},
    {"temperature": 1e-5, "min_tokens": 9},
    {"temperature": 1.1, "top_p": 0.5, "logit_bias": {5: 8.0}, "presence_penalty": 0.5},
]


def params(seed: int) -> list[SamplingParams]:
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [SamplingParams(**kind, **common, seed=seed + i) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Less than half the spread of the other tests' models: logits that leave a choice.
    model = tiny_hf_model("qwen3", seed=9, initializer_range=0.08)
    return save(model, tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_seeds_give_the_tokens_of_the_reference(
    folder: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    draw = NativeDrawer.draw

    def counted(self: NativeDrawer, logits: Any, rows: Any, *rest: Any) -> Any:
        counts.append(len(rows))
        return draw(self, logits, rows, *rest)

    monkeypatch.setattr(NativeDrawer, "draw", counted)
    found = {}
    for kernels in ("reference", "auto"):
        options: dict[str, Any] = {"kernels": kernels, "logprobs_mode": mode}
        with LLM(folder, dtype="float32", num_pages=64, threads=2, **options) as llm:
            outputs = llm.generate(PROMPTS, params(1), use_tqdm=False)
            found[kernels] = [output.token_ids for output in outputs]
        assert kernels == "auto" or not counts
    assert found["auto"] == found["reference"]
    # All but the greedy request, in each step; with processed logprobs PyTorch draws again.
    assert counts == [len(KINDS) - 1] * MAX_TOKENS
    assert len({token for ids in found["auto"] for token in ids}) > 60, "hardly anything was drawn"


def test_seeds_give_the_same_tokens_alone_and_in_a_batch(folder: str) -> None:
    for threads in (1, 3):
        with LLM(folder, dtype="float32", num_pages=64, threads=threads) as llm:
            together = llm.generate(PROMPTS, params(5), use_tqdm=False)
            backwards = llm.generate(PROMPTS[::-1], params(5)[::-1], use_tqdm=False)[::-1]
            for prompt, one, a, b in zip(PROMPTS, params(5), together, backwards, strict=True):
                [alone] = llm.generate([prompt], one, use_tqdm=False)
                assert a.token_ids == alone.token_ids == b.token_ids
