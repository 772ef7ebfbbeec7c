"""`benchmark/quality.py`: its arithmetic, and that it sees the distributions of every token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmark import quality
from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from tests.unit.checkpoints import checkpoint

WINDOWS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9]]


def test_figures_of_two_tokens() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]]).log()
    found = quality.compare(reference, other, torch.tensor([0, 1]))
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found.mean_kl == pytest.approx(kl / 2, rel=1e-6)
    assert found.p99_kl == pytest.approx(0.99 * kl, rel=1e-6)  # between the two, 99% of the way
    assert found.top1 == 0.5
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.7), rel=1e-6)


def test_nothing_parts_a_configuration_from_itself() -> None:
    logprobs = torch.randn(5, 11).log_softmax(-1)
    found = quality.compare(logprobs, logprobs, torch.arange(5))
    assert (found.mean_kl, found.p99_kl, found.top1) == (0.0, 0.0, 1.0)


def test_windows() -> None:
    ids = list(range(20))
    assert quality.windows_of(ids, 10, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert quality.windows_of(ids, 9, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match="--tokens 21: the text has 20"):
        quality.windows_of(ids, 21, 4)


def test_configurations() -> None:
    expected = EngineConfig(quantization="int8", dtype="float32")
    found = quality.parse_configuration("int8=--quantization int8 --dtype=float32")
    assert found == ("int8", expected)
    assert quality.parse_configuration("gguf=") == ("gguf", EngineConfig())
    for text in ("int8", "=--dtype float32"):
        with pytest.raises(ConfigError, match="NAME=FLAGS"):
            quality.parse_configuration(text)


@pytest.mark.parametrize("budget", [256, 3, 1])
def test_distributions_are_those_that_score_the_prompt(tmp_path: Path, budget: int) -> None:
    """However many tokens a step computes: each row's entry for the next token is its logprob."""
    path = checkpoint(tmp_path)
    options = {"max_prefill_length": budget, "max_running_requests": 1}
    with LLM(path, device="cpu", kernels="reference", num_pages=8, **options) as llm:
        found = quality.next_token_logprobs(llm, WINDOWS)
        llm.reset_prefix_cache()
        outputs = llm.generate(
            WINDOWS, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
    targets = torch.tensor([token for window in WINDOWS for token in window[1:]])
    rows = [row for output in outputs for row in (output.prompt_logprobs or [])[1:]]
    scores = torch.tensor([row.logprob for row in rows if row is not None])
    assert found.shape == (len(targets), 131)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(targets)))
    # float32 sums of another batch's shape: the order differs, a few units in the last place.
    torch.testing.assert_close(found.gather(1, targets.unsqueeze(1)).squeeze(1), scores)
