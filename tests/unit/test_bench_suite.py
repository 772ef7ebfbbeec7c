"""`minisgl bench offline --suite cpu`: what tokens need, figures beside limits, flags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.benchmark import limits, suite
from minisgl.benchmark.workloads import Job
from minisgl.cli import main
from minisgl.cli.flags import add_flags, from_flags
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model
from tests.unit.checkpoints import checkpoint, config_of

BANDWIDTH, GEMM_RATE = 1e6, 1e8
OUTPUT = {"single": 5, "prefill": 1, "batch": 4, "prefix": 3}
ENGINE = {"device": "cpu", "kernels": "reference", "num_pages": 64}
FLAGS = [f for k, v in ENGINE.items() for f in (f"--{k.replace('_', '-')}", str(v))]


def jobs_of(name: str, vocab_size: int) -> list[Job]:
    """The workloads, shrunk: `prefix` shares 32 tokens, two pages."""
    count = {"batch": 3, "prefix": 4}.get(name, 1)
    shared = [i % vocab_size for i in range(32)]
    return [Job([*shared, i + 1, i + 2, i + 3], OUTPUT[name]) for i in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny checkpoint in float32, without tokenizer."""
    return str(checkpoint(tmp_path_factory.mktemp("suite")))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small workloads on a machine of known limits."""
    monkeypatch.setattr(suite, "make_workload", jobs_of)
    monkeypatch.setattr(suite, "read_bandwidth", lambda device: BANDWIDTH)
    monkeypatch.setattr(suite, "gemm_rate", lambda device, dtype: GEMM_RATE)
    monkeypatch.setattr(suite, "first_token_s", lambda model, config: 1.25)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def config_named(name: str, **changes: Any) -> ModelConfig:
    """A shrunk published config."""
    return ModelConfig.from_hf(SimpleNamespace(**config_of(name, **changes)))


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """The model's weights, without memory."""
    set_rope_device("cpu")
    with torch.device("meta"):
        return dict(create_model(config).state_dict())


# -- what tokens need ----------------------------------------------------------------------


QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [("qwen3-0.6b", {}), ("qwen3-30b-a3b", {}), ("qwen3-30b-a3b", QWEN2_MOE)],
    ids=["dense", "experts", "experts and a shared one"],
)
def test_flops_are_two_for_each_weight_that_a_token_meets(
    name: str, changes: dict[str, Any]
) -> None:
    config = config_named(name, **changes)
    weights = weights_of(config)
    met = 0.0
    for key, tensor in weights.items():
        if tensor.dim() == 3:  # experts: a token meets some
            met += tensor.numel() * config.num_experts_per_tok / config.num_experts
        elif tensor.dim() == 2 and "layers" in key:
            met += tensor.numel()
    assert limits.token_flops(config) == 2 * met
    assert limits.head_flops(config) == 2 * weights["model.embed_tokens.weight"].numel()
    # A step of one token reads what it meets.
    read = limits.step_weights(config, 1)
    assert 2 * read == pytest.approx(2 * met + limits.head_flops(config))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 9), (3, 17)])
def test_attention_counts_the_keys_that_each_query_sees(
    window: int | None, first: int, end: int
) -> None:
    more = {} if window is None else {"sliding_window": window, "use_sliding_window": True}
    config = config_named("qwen3-0.6b", max_window_layers=1, **more)
    seen = 0
    for layer in range(config.num_layers):
        for query in range(first, end):
            near = config.layer_window(layer)
            seen += sum(near is None or query - key < near for key in range(query + 1))
    if window is not None and end > window:
        assert seen < config.num_layers * sum(range(first + 1, end + 1))
    expected = 4 * config.num_qo_heads * config.head_dim * seen
    assert limits.attention_flops(config, first, end) == expected


def test_ceilings_are_of_the_order_of_a_computer() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < limits.read_bandwidth(cpu, size_bytes=1 << 20, repeats=1) < 1e13
    assert 1e6 < limits.gemm_rate(cpu, torch.float32, size=64, repeats=1) < 1e14


# -- the suite -----------------------------------------------------------------------------


def test_each_figure_has_its_share_of_the_limit(
    model: str, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "offline", "--suite", "cpu", "--model", model, "--repeats", "1", *FLAGS]
    assert main([*command, "--log-level", "error", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["benchmark"], found["dtype"], found["device"]) == ("suite cpu", "float32", "cpu")
    assert (found["native"], found["deterministic"], found["first_token_s"]) == (False, False, 1.25)
    config = config_named("qwen3-0.6b")
    weights = weights_of(config)
    read = sum(tensor.nbytes for tensor in weights.values())
    if not config.tie_word_embeddings:
        read -= weights["model.embed_tokens.weight"].nbytes
    assert found["weight_bytes_read"] == read
    rows = {row["workload"]: row for row in found["rows"]}
    assert [rows[name]["row"] for name in ("single", "prefill", "batch", "prefix")] == list("abcd")
    step_s = read / BANDWIDTH
    single = rows["single"]
    assert single["limit"] == round(1 / step_s, 2)
    assert single["share"] == pytest.approx(single["figure"] * step_s, abs=0.01)
    # One step: the operations of 35 tokens, their attention and one row of logits.
    flops = 35 * limits.token_flops(config) + limits.attention_flops(config, 0, 35)
    prefill_s = max(step_s, (flops + limits.head_flops(config)) / GEMM_RATE)
    assert rows["prefill"]["limit"] == pytest.approx(35 / prefill_s, abs=0.01)
    assert rows["prefix"]["unit"] == "seconds"
    # The first computes 35 tokens, then three compute 3 each beside a decode, then one decode.
    first = 35 * limits.token_flops(config) + limits.head_flops(config)
    assert rows["prefix"]["steps"] == 4
    assert rows["prefix"]["limit"] > max(step_s, first / GEMM_RATE) + 3 * step_s - 0.01


def test_the_table_has_a_row_a_workload(
    model: str, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from minisgl.benchmark.report import print_suite_table

    results = suite.bench_cpu_suite(model, EngineConfig(**ENGINE), repeats=1)
    print_suite_table(results)
    lines = capsys.readouterr().out.splitlines()
    for row in results["rows"]:
        assert any(row["workload"] in line and f"{row['figure']:,}" in line for line in lines)
    assert any("torch kernels" in line for line in lines)
    assert "first token 1.25 s" in lines[-1]


def test_what_the_suite_refuses(model: str, small: None) -> None:
    with pytest.raises(ConfigError, match="--repeats = 0"):
        suite.bench_cpu_suite(model, EngineConfig(**ENGINE), repeats=0)
    short = EngineConfig(**ENGINE, max_model_len=32)
    with pytest.raises(ConfigError, match=r"40 tokens.*up to 32.*--max-model-len"):
        suite.bench_cpu_suite(model, short, repeats=1)


@pytest.mark.parametrize(
    "flags", [["--workload", "batch"], ["--compare", "transformers"], ["--trace-file", "t.json"]]
)
def test_the_suite_has_its_own_workloads(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", "--suite", "cpu", *flags]) == 2
    assert "--suite has workloads of its own" in capsys.readouterr().err


# -- start to first token ------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(dtype="bfloat16", threads=2, memory_ratio=0.25, page_size=32),
        EngineConfig(quantization="int8", deterministic=True, cache="naive"),
    ],
)
def test_flags_make_the_same_configuration(config: EngineConfig) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, "engine")
    assert from_flags(EngineConfig, parser.parse_args(suite.config_flags(config))) == config


def script(folder: Path, body: str) -> str:
    """An executable in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_first_token_runs_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "executable", script(tmp_path, f'echo "$@" >> {log}; printf Hi'))
    assert suite.first_token_s("some-model", EngineConfig(dtype="float32")) > 0
    calls = log.read_text().splitlines()
    assert len(calls) == 4 and len(set(calls)) == 1
    assert calls[0].startswith("-m minisgl generate --model some-model --max-tokens 1 ")
    assert calls[0].endswith("--dtype float32 Hello")


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path, "echo no such model >&2; exit 2"))
    with pytest.raises(ConfigError, match="generate --model m .*: no such model"):
        suite.first_token_s("m", EngineConfig())
