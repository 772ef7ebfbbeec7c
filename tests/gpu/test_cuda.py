"""The plain torch ops on a CUDA device give the CPU's tokens, and the pool is sized to fit.

Float32 on both sides (torch leaves TF32 off), models whose logits are far apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from tools.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.gpu  # needs a CUDA device

CONFIGS = Path(__file__).parents[1] / "configs"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama-3.1-8b-instruct": {},
    "mistral-7b-v0.1": {"sliding_window": 12},
    "qwen2.5-0.5b-instruct": {},
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PROMPTS = [[(7 * i + j * j) % 300 for j in range(length)] for i, length in enumerate((3, 40, 17))]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, seed=5, max_tokens=32, presence_penalty=0.5,
    repetition_penalty=1.2, ignore_eos=True, logprobs=2,
)  # fmt: skip


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    config = json.loads((CONFIGS / f"{request.param}.json").read_text())
    config |= SMALL | MODELS[request.param]
    make_checkpoint(config, str(tmp_path), dtype="float32", scale=0.3)
    return str(tmp_path)


def ids(folder: str, params: SamplingParams, **options: Any) -> list[list[int]]:
    with LLM(folder, dtype="float32", **options) as llm:
        on_cuda = llm.engine.config.device.type == "cuda"
        assert llm.engine.config.overlap == (on_cuda and options.get("overlap") != "off")
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if "num_pages" in options:
            assert llm.scheduler.stats.num_retractions > 0, "the pool was meant to be too small"
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_cuda_equals_cpu(checkpoint: str, params: SamplingParams) -> None:
    expected = ids(checkpoint, params, device="cpu", max_model_len=128)
    for options in (
        {},
        {"overlap": "off", "cache": "naive"},
        {"page_size": 1, "max_prefill_length": 16, "max_running_requests": 4},
        {"page_size": 4, "num_pages": 32},
    ):
        # A small share of the card: a pool of all of it takes seconds to make.
        config = {"memory_ratio": 0.05, **options}
        got = ids(checkpoint, params, device="cuda", max_model_len=128, **config)
        assert got == expected, options


def test_the_pool_is_sized_from_a_measured_peak_and_a_full_load_fits(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-0.6b.json").read_text()) | {"num_hidden_layers": 4}
    make_checkpoint(config, str(tmp_path))
    _, total = torch.cuda.mem_get_info()
    ratio = 0.12
    with LLM(str(tmp_path), device="cuda", memory_ratio=ratio, max_model_len=4096) as llm:
        prompts = [[(i * 31 + j) % 1000 for j in range(1500)] for i in range(64)]
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.token_ids) == 64 for output in outputs)
        free, _ = torch.cuda.mem_get_info()
        # What the plan can't see: fragments of torch's cache, kernels loaded later.
        assert total - free < total * ratio + (3 << 29)
