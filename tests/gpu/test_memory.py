"""The KV pool is sized from what the largest steps were measured to need, so that they fit."""

from __future__ import annotations

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.gpu.small_models import published_config, steps
from tests.helpers import random_prompts
from tools.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.gpu  # needs a CUDA device

SLACK_BYTES = 3 << 29
"""What the plan can't see: fragments of torch's cache, kernels loaded later."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-0.6B with 4 of its 28 layers: the vocabulary is what sampling's memory depends on."""
    config = published_config("qwen3-0.6b") | {"num_hidden_layers": 4}
    target = tmp_path_factory.mktemp("qwen3")
    return str(make_checkpoint(config, target, write_tied_head=False))


def used_bytes() -> int:
    """Of the whole card."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def allowed_bytes(ratio: float) -> float:
    """What may be used of it by the end."""
    return torch.cuda.mem_get_info()[1] * ratio + SLACK_BYTES


def test_the_pool_is_sized_from_a_measured_peak_and_a_full_load_fits(folder: str) -> None:
    ratio = 0.12
    prompts = [[(i * 31 + j) % 1000 for j in range(1500)] for i in range(64)]
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=64, ignore_eos=True)
    with LLM(folder, device="cuda", memory_ratio=ratio, max_model_len=4096) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.token_ids) == 64 for output in outputs)
        assert used_bytes() < allowed_bytes(ratio)
        # Nor is it much smaller than it could be: most of the share holds keys and values.
        assert llm.engine._pool.data.nbytes > allowed_bytes(ratio) / 2


def test_the_largest_chunks_and_a_full_batch_with_every_option_fit(folder: str) -> None:
    ratio, size, num_tokens = 0.9, 256, 24
    params = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 1.0}, min_tokens=2,
        logprobs=20, max_tokens=num_tokens, ignore_eos=True,
    )  # fmt: skip
    with LLM(folder, device="cuda", memory_ratio=ratio, max_model_len=16384) as llm:
        config = llm.engine.config
        assert config.max_running_requests == config.cuda_graph_max_bs == size
        # A prompt that fills two steps, then as many as can run beside it: all these decode
        # together in the end, and from the start when they come from the prefix cache.
        [long] = random_prompts([2 * config.max_prefill_length - num_tokens], 1000, seed=1)
        others = random_prompts([256] * (size - 1), 1000, seed=2)
        start = steps(llm)
        outputs = llm.generate([long, *others], params, use_tqdm=False)
        middle = steps(llm)
        outputs += llm.generate(others, params, use_tqdm=False)
        assert used_bytes() < allowed_bytes(ratio)
        assert llm.scheduler.stats.num_retractions == 0
        assert llm.scheduler.stats.num_hit_tokens > 0
        assert middle.launched - start.launched >= 2
        assert steps(llm).replayed - middle.replayed >= num_tokens - 1
    for output in outputs:
        assert len(output.token_ids) == num_tokens
        assert output.logprobs is not None
        assert [len(entry.top) for entry in output.logprobs] == [20] * num_tokens


def test_late_chunks_of_long_prompts_fit_the_plain_backend(folder: str) -> None:
    """Its scores of a whole chunk, 16 heads by 8,192 by 32,000 in float32, would take 16 GiB."""
    ratio, params = 0.2, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = random_prompts([32_000, 20_000, *[3000] * 30], 1000, seed=4)
    with LLM(folder, device="cuda", attn="torch", memory_ratio=ratio, max_model_len=32_768) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert used_bytes() < allowed_bytes(ratio)
    assert all(len(output.token_ids) == 8 for output in outputs)
