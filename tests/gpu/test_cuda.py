"""A CUDA device gives the CPU's tokens, whichever kernels compute and however steps are launched.

Float32 on both sides (torch leaves TF32 off), models whose logits are far apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from tests.gpu.small_models import MODELS, VOCAB, save_small
from tests.helpers import random_prompts

pytestmark = pytest.mark.gpu  # needs a CUDA device

PROMPTS = random_prompts([3, 40, 17, 1, 33, 20], VOCAB, seed=1)
COMMON: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **COMMON)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, seed=5, presence_penalty=0.5, repetition_penalty=1.2,
    logprobs=2, **COMMON,
)  # fmt: skip
PARAMS = [GREEDY] * 3 + [SEEDED] * 3
# With little else to capture than what the requests need: it takes most of the time.
SIZES: dict[str, Any] = {"max_model_len": 128, "num_pages": 64, "max_running_requests": 8}
TINY_POOL = {"page_size": 4, "num_pages": 32}


def ids(folder: str, device: str, options: dict[str, Any]) -> list[list[int]]:
    with LLM(folder, dtype="float32", device=device, **{**SIZES, **options}) as llm:
        config = llm.engine.config
        assert config.triton == (device == "cuda" and options.get("kernels") != "reference")
        assert config.overlap == (device == "cuda" and options.get("overlap") != "off")
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        if options == TINY_POOL:
            assert llm.scheduler.stats.num_retractions > 0, "the pool was meant to be too small"
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_cuda_equals_cpu(name: str, tmp_path: Path) -> None:
    folder = save_small(name, tmp_path)
    expected = ids(folder, "cpu", {})
    for options in (
        {},
        {"cuda_graph_max_bs": 0},
        {"attn": "torch"},
        {"kernels": "reference"},
        {"overlap": "off", "cache": "naive"},
        {"page_size": 1, "num_pages": 1024, "max_prefill_length": 16, "max_running_requests": 4},
        TINY_POOL,
    ):
        assert ids(folder, "cuda", options) == expected, options
