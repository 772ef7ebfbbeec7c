"""What `resolve` makes of quantization, the KV cache's type, and the native kernels."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from minisgl.cli.flags import add_flags, from_flags
from minisgl.config import EngineConfig, ModelFacts, ResolvedConfig
from minisgl.errors import ConfigError
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware

PLAIN = Hardware(num_cpus=4, available_bytes=8 << 30, has_cuda=False)
NATIVE = replace(PLAIN, has_native=True)
TRITON = replace(PLAIN, has_cuda=True, has_triton=True)
MODEL = ModelFacts(torch.bfloat16, max_context=4096)
GGUF = replace(MODEL, quantized=True)


def resolved(hardware: Hardware, model: ModelFacts = MODEL, **options: object) -> ResolvedConfig:
    return resolve(EngineConfig(**options), hardware, model)


def why(config: ResolvedConfig, name: str) -> str:
    [reason] = [reason for reason in config.reasons if reason.startswith(f"{name} = ")]
    return reason


@pytest.mark.parametrize(
    ("hardware", "model", "options", "reason"),
    [
        (NATIVE, MODEL, {}, "native = True: the native CPU kernels compute whole steps"),
        (PLAIN, MODEL, {}, "native = False: the native CPU kernels are not there"),
        (NATIVE, MODEL, {"kernels": "reference"}, "native = False: --kernels reference"),
        (NATIVE, replace(MODEL, num_experts=8), {}, "native = True"),
        (replace(NATIVE, has_cuda=True), MODEL, {}, "native = False: they are for CPUs"),
        (replace(NATIVE, has_cuda=True), MODEL, {"device": "cpu"}, "native = True"),
    ],
)
def test_native_kernels_run_on_a_cpu(hardware, model, options, reason):
    config = resolved(hardware, model, **options)
    assert why(config, "native").startswith(reason)
    assert config.native == reason.startswith("native = True")


@pytest.mark.parametrize(
    ("hardware", "model", "options", "expected", "reason"),
    [
        (NATIVE, GGUF, {}, "keep", "the checkpoint is quantized"),
        (NATIVE, MODEL, {}, "none", "has no blocks"),
        (PLAIN, GGUF, {}, "none", "kept for native kernels only (the native CPU kernels are not"),
        (NATIVE, GGUF, {"dtype": "bfloat16"}, "none", "--dtype bfloat16 asks for"),
        (NATIVE, GGUF, {"kernels": "reference"}, "none", "(--kernels reference)"),
    ],
)
def test_blocks_are_kept_where_native_kernels_use_them(hardware, model, options, expected, reason):
    config = resolved(hardware, model, **options)
    assert config.quantization == expected
    assert reason in why(config, "quantization")


def test_quantization_as_asked():
    assert resolved(NATIVE, GGUF, quantization="none").quantization == "none"
    for asked in ("int8", "int4"):
        for options in ({}, {"dtype": "float32"}):
            config = resolved(NATIVE, quantization=asked, **options)
            assert config.quantization == asked
            assert not any("quantization" in reason for reason in config.reasons)
        assert resolved(PLAIN, quantization=asked).quantization == asked
        slow = why(resolved(PLAIN, quantization=asked), "quantization")
        assert "slow" in slow
        assert "the native CPU kernels are not there" in slow
        heads = replace(MODEL, num_qo_heads=4, num_kv_heads=2)
        with pytest.raises(ConfigError, match=f"{asked} runs on one rank only, not with --tp 2"):
            resolved(NATIVE, heads, quantization=asked, tp=2)
        cuda = replace(NATIVE, has_cuda=True)
        with pytest.raises(ConfigError, match=f"--quantization {asked} is for CPUs: use --device"):
            resolved(cuda, quantization=asked)


def test_kv_dtype_is_that_of_the_computation_unless_native_kernels_run():
    assert resolved(PLAIN).kv_dtype == torch.bfloat16
    assert resolved(PLAIN, dtype="float32").kv_dtype == torch.float32
    assert "kv_dtype = torch.bfloat16: the type of computation" in resolved(NATIVE).reasons
    assert resolved(PLAIN, kv_dtype="bfloat16").kv_dtype == torch.bfloat16
    for asked in ("float32", "bfloat16", "int8"):
        config = resolved(NATIVE, kv_dtype=asked)
        assert config.kv_dtype == getattr(torch, asked)
        assert not any("kv_dtype" in reason for reason in config.reasons)
    for options in ({"kv_dtype": "int8"}, {"kv_dtype": "float32"}):
        message = "--kv-dtype .* beside --dtype bfloat16 needs the native CPU kernels, .* not there"
        with pytest.raises(ConfigError, match=message):
            resolved(PLAIN, **options)
    with pytest.raises(ConfigError, match="for CPUs, and the model runs on CUDA"):
        resolved(replace(NATIVE, has_cuda=True), kv_dtype="int8")


def test_deterministic_needs_native_or_triton_kernels():
    assert not resolved(NATIVE).deterministic
    assert resolved(NATIVE, deterministic=True).deterministic
    assert resolved(TRITON, deterministic=True).deterministic
    for hardware, reason in ((PLAIN, "not there"), (replace(NATIVE, has_cuda=True), "CUDA")):
        message = f"--deterministic needs the native CPU kernels or the Triton .*{reason}"
        with pytest.raises(ConfigError, match=message):
            resolved(hardware, deterministic=True)
    with pytest.raises(ConfigError, match="--deterministic on CUDA needs --attn triton, not torch"):
        resolved(TRITON, deterministic=True, attn="torch")
    with pytest.raises(ConfigError, match="--deterministic = 'on' must be True or False"):
        EngineConfig(deterministic="on")


def test_flags():
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, "engine")
    line = ["--quantization", "int4", "--kv-dtype", "int8", "--deterministic"]
    config = from_flags(EngineConfig, parser.parse_args(line))
    assert (config.quantization, config.kv_dtype, config.deterministic) == ("int4", "int8", True)
    for options, message in (
        ({"quantization": "int3"}, "--quantization = 'int3': choose from auto, none, int8, int4"),
        ({"kv_dtype": "float16"}, "--kv-dtype = 'float16': choose from auto, float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(**options)
