"""What `resolve` makes of CUDA hardware: kernels, attention, captured steps, and why.

No GPU is needed: the hardware is told. `deterministic` is in `test_quant_config.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.cli.flags import Parser, add_flags, from_flags
from minisgl.config import EngineConfig, ModelFacts, ResolvedConfig
from minisgl.errors import ConfigError
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware

CPU = Hardware(num_cpus=4, available_bytes=8 << 30, has_cuda=False, has_native=True)
BARE = replace(CPU, has_cuda=True)
GPU = replace(BARE, has_triton=True)
WITH_FLASHINFER = replace(GPU, has_flashinfer=True)
MODEL = ModelFacts(torch.bfloat16, max_context=4096)
MOE = replace(MODEL, num_experts=8)
FASTEST = "it runs in CUDA graphs, and decodes near the speed of a copy"


def resolved(hardware: Hardware, model: ModelFacts = MODEL, **options: object) -> ResolvedConfig:
    return resolve(EngineConfig(**options), hardware, model)


def reasons(config: ResolvedConfig, name: str) -> list[str]:
    """What is said of a choice; nothing if the user made it."""
    return [reason for reason in config.reasons if reason.startswith(f"{name} = ")]


@pytest.mark.parametrize(
    ("hardware", "options", "triton", "why"),
    [
        (GPU, {}, True, "fused kernels for CUDA"),
        (GPU, {"dtype": "float32"}, True, "fused kernels for CUDA"),
        (GPU, {"attn": "torch"}, True, "fused kernels for CUDA"),
        (GPU, {"kernels": "reference"}, False, "--kernels reference"),
        (BARE, {}, False, "Triton is not installed; plain PyTorch ops are slower"),
        (BARE, {"kernels": "reference"}, False, "--kernels reference"),
    ],
)
def test_triton_kernels_run_on_cuda(hardware, options, triton, why) -> None:
    config = resolved(hardware, **options)
    assert (config.device.type, config.native, config.triton) == ("cuda", False, triton)
    assert reasons(config, "triton") == [f"triton = {triton}: {why}"]


def test_a_cpu_has_none_of_it() -> None:
    for hardware in (CPU, replace(CPU, has_triton=True), WITH_FLASHINFER):
        config = resolved(hardware, device="cpu")
        assert (config.triton, config.attn, config.cuda_graph_max_bs) == (False, "torch", 0)
        assert not reasons(config, "triton")
        assert reasons(config, "cuda_graph_max_bs") == [
            "cuda_graph_max_bs = 0: there are none on a CPU"
        ]


@pytest.mark.parametrize(
    ("hardware", "options", "attn", "why"),
    [
        (GPU, {}, "triton", [FASTEST]),
        (WITH_FLASHINFER, {}, "triton", [FASTEST]),
        (GPU, {"attn": "triton"}, "triton", []),
        (GPU, {"attn": "torch"}, "torch", []),
        (WITH_FLASHINFER, {"attn": "flashinfer"}, "flashinfer", []),
        (WITH_FLASHINFER, {"attn": "flashinfer", "dtype": "float16"}, "flashinfer", []),
        (GPU, {"kernels": "reference"}, "torch", ["the Triton kernels don't run"]),
        (BARE, {}, "torch", ["the Triton kernels don't run"]),
        (BARE, {"attn": "torch"}, "torch", []),
    ],
)
def test_attention(hardware, options, attn, why) -> None:
    config = resolved(hardware, **options)
    assert config.attn == attn
    assert reasons(config, "attn") == [f"attn = {attn}: {reason}" for reason in why]


@pytest.mark.parametrize(
    ("hardware", "options", "message"),
    [
        (CPU, {"attn": "triton"}, "--attn triton .* the model runs on the CPU; use --attn auto"),
        (CPU, {"attn": "flashinfer"}, "--attn flashinfer .* the model runs on the CPU"),
        (BARE, {"attn": "triton"}, "--attn triton .* Triton is not installed"),
        (
            WITH_FLASHINFER,
            {"attn": "flashinfer", "kernels": "reference"},
            "--attn flashinfer needs the Triton kernels, .*: --kernels reference; use --attn auto",
        ),
        (GPU, {"attn": "flashinfer"}, "the package flashinfer-python is not installed"),
        (
            WITH_FLASHINFER,
            {"attn": "flashinfer", "dtype": "float32"},
            "--attn flashinfer has no kernels for float32: use --dtype bfloat16 or float16",
        ),
    ],
)
def test_attention_that_cannot_be(hardware, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(hardware, **options)


@pytest.mark.parametrize(
    ("options", "size", "why"),
    [
        ({}, 256, ["as many as max_running_requests"]),
        ({"max_running_requests": 40}, 40, ["as many as max_running_requests"]),
        ({"max_prefill_length": 100}, 100, ["as many as max_running_requests"]),
        ({"cuda_graph_max_bs": 7}, 7, []),
        ({"cuda_graph_max_bs": 256}, 256, []),
        ({"cuda_graph_max_bs": 0}, 0, []),
        ({"cuda_graph_max_bs": 500}, 256, []),
        ({"cuda_graph_max_bs": 9, "max_running_requests": 4}, 4, []),
        ({"cuda_graph_max_bs": 8, "deterministic": True}, 8, []),
    ],
)
def test_steps_are_captured_up_to_the_largest_batch(options, size, why) -> None:
    config = resolved(GPU, **options)
    assert config.cuda_graph_max_bs == size <= config.max_running_requests
    assert reasons(config, "cuda_graph_max_bs") == [
        f"cuda_graph_max_bs = {size}: {reason}" for reason in why
    ]


@pytest.mark.parametrize(
    ("hardware", "model", "options", "why"),
    [
        (CPU, MODEL, {}, "there are none on a CPU"),
        (GPU, MODEL, {"attn": "torch"}, "attention by torch plans each step on the host"),
        (
            WITH_FLASHINFER,
            MODEL,
            {"attn": "flashinfer"},
            "attention by flashinfer plans each step on the host",
        ),
        (GPU, MODEL, {"kernels": "reference"}, "attention by torch plans each step on the host"),
        (BARE, MODEL, {}, "attention by torch plans each step on the host"),
    ],
)
def test_steps_that_cannot_be_captured(hardware, model, options, why) -> None:
    config = resolved(hardware, model, **options)
    assert config.cuda_graph_max_bs == 0
    assert reasons(config, "cuda_graph_max_bs") == [f"cuda_graph_max_bs = 0: {why}"]
    assert resolved(hardware, model, cuda_graph_max_bs=0, **options).cuda_graph_max_bs == 0
    message = f"--cuda-graph-max-bs 8 needs CUDA graphs, and {why}; leave it out"
    with pytest.raises(ConfigError) as error:
        resolved(hardware, model, cuda_graph_max_bs=8, **options)
    assert str(error.value) == message


def test_sums_of_many_ranks_are_not_deterministic() -> None:
    gpus = replace(GPU, num_gpus=4)
    model = replace(MODEL, num_qo_heads=8, num_kv_heads=4)
    assert resolved(gpus, model, tp=2, deterministic=True).deterministic
    with pytest.raises(ConfigError, match=r"--deterministic with --tp 4 on CUDA.*use --tp 2"):
        resolved(gpus, model, tp=4, deterministic=True)


def test_experts_run_as_dense_models_do() -> None:
    config = resolved(GPU, MOE, deterministic=True)
    assert (config.triton, config.attn, config.deterministic) == (True, "triton", True)
    assert config.cuda_graph_max_bs == config.max_running_requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn": "flash"}, "--attn = 'flash': choose from auto, torch, triton, flashinfer"),
        ({"kernels": "triton"}, "--kernels = 'triton': choose from auto, reference"),
        ({"load_format": "gguf"}, "--load-format = 'gguf': choose from auto, dummy"),
        ({"cuda_graph_max_bs": -1}, "--cuda-graph-max-bs = -1 must be an integer of at least 1"),
        ({"cuda_graph_max_bs": 2.0}, "--cuda-graph-max-bs = 2.0 must .*, or 0 for none"),
        ({"cuda_graph_max_bs": True}, "--cuda-graph-max-bs = True must"),
    ],
)
def test_bad_values_name_flag_and_value(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_each_rank_of_a_node_has_a_gpu() -> None:
    heads = replace(MODEL, num_qo_heads=8, num_kv_heads=8)
    four = replace(GPU, num_gpus=4)
    two_nodes = {"nnodes": 2, "dist_init_addr": "node0:29500"}
    assert resolved(four, heads, tp=4).tp == 4
    assert resolved(four, heads, tp=8, **two_nodes).tp == 8
    with pytest.raises(ConfigError, match="--tp 8 needs a GPU for each .* 8 ranks, .* sees 4 here"):
        resolved(four, heads, tp=8)
    three = replace(GPU, num_gpus=3)
    with pytest.raises(ConfigError, match="--tp 8 with --nnodes 2 needs .* 4 ranks, .* sees 3"):
        resolved(three, heads, tp=8, **two_nodes)


def test_flags() -> None:
    parser = Parser(prog="minisgl")
    add_flags(parser, EngineConfig, "engine")
    assert from_flags(EngineConfig, parser.parse_args([])) == EngineConfig()
    line = "--attn flashinfer --kernels reference --cuda-graph-max-bs 0 --load-format dummy"
    assert from_flags(EngineConfig, parser.parse_args(line.split())) == EngineConfig(
        attn="flashinfer", kernels="reference", cuda_graph_max_bs=0, load_format="dummy"
    )
