"""Whole models on quantized weights: their logits are those of the dequantized model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.engine import Engine
from minisgl.kernel.quant import dequantize, quantize
from minisgl.models import load_model_info
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware
from tests.helpers import engine_logits
from tests.unit.checkpoints import checkpoint
from tests.unit.gguf_files import Written

IDS = list(range(3, 33))
POSITIONS = [0, 5, 16, 29]
KINDS = {
    "token_embd.weight": "Q6_K",
    "output.weight": "Q8_0",
    "blk.0.attn_q.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q5_0",
    "blk.0.attn_v.weight": "Q4_1",
    "blk.1.attn_v.weight": "F16",
    "blk.1.ffn_up.weight": "Q8_0",
}


def logits(path: str | Path, quantization: str) -> torch.Tensor:
    info = load_model_info(str(path))
    config = EngineConfig(
        device="cpu", dtype="float32", kernels="reference", num_pages=8, max_model_len=64
    )
    resolved = replace(resolve(config, Hardware.detect(), info.facts()), quantization=quantization)
    engine = Engine(str(path), info.config, resolved)
    try:
        return engine_logits(engine, IDS, POSITIONS, chunk=16)
    finally:
        engine.close()


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of float32 sums, through two layers."""
    scale = expected.abs().max().item()
    assert scale > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(scale, 1))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_file_of_mixed_types_kept_computes_what_it_does_dequantized(tmp_path, arch):
    path = Written(tmp_path / "m.gguf", arch, "Q4_0", kinds=KINDS).path
    assert_alike(logits(path, "keep"), logits(path, "none"))


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
@pytest.mark.parametrize("tied", [True, False])
def test_quantizing_at_load_is_rounding_the_weights(tmp_path, quantization, kind, tied):
    folder = checkpoint(
        tmp_path / "m", hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, tie_word_embeddings=tied,
    )  # fmt: skip
    found, original = logits(folder, quantization), logits(folder, "none")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored = "Q8_0" if name in ("model.embed_tokens.weight", "lm_head.weight") else kind
            tensors[name] = dequantize(quantize(tensor, stored), stored)
    save_file(tensors, folder / "model.safetensors")
    assert_alike(found, logits(folder, "none"))
    assert (found - original).abs().max() > 1e-3 * original.abs().max()  # they were rounded
