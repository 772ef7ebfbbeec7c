"""GGUF files with experts: what they may leave out, and what a rank does not read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minisgl.models.gguf
from minisgl.errors import UnsupportedModelError
from minisgl.models.gguf import iter_gguf_tensors, load_gguf_config
from tests.unit.gguf_files import HIDDEN, KV, SHARED_FFN, Q, Written

ROUTER = "blk.0.ffn_gate_inp_shexp.weight"


def test_a_key_has_the_say_on_the_shared_experts_size(tmp_path: Path) -> None:
    keys = {"qwen2moe.expert_shared_feed_forward_length": SHARED_FFN + 1}
    config = load_gguf_config(Written(tmp_path / "m.gguf", "qwen2moe", keys=keys).path)
    assert config["shared_expert_intermediate_size"] == SHARED_FFN + 1


def test_the_shared_experts_gate_may_have_one_dimension_or_two(tmp_path: Path) -> None:
    extra = {ROUTER: np.linspace(0, 1, HIDDEN).reshape(1, HIDDEN)}
    written = Written(tmp_path / "m.gguf", "qwen2moe", extra=extra, kinds={ROUTER: "F16"})
    got = dict(iter_gguf_tensors(written.path, torch.float32))
    for layer in range(2):
        gate = got[f"model.layers.{layer}.mlp.shared_expert_gate.weight"]
        expected = written.value(f"blk.{layer}.ffn_gate_inp_shexp.weight")
        assert torch.equal(gate, expected.view(1, HIDDEN))


def test_biases_of_experts_models(tmp_path: Path) -> None:
    none = tuple(f"blk.{layer}.attn_{part}.bias" for layer in range(2) for part in "qkv")
    written = Written(tmp_path / "none.gguf", "qwen2moe", drop=none)
    assert load_gguf_config(written.path)["qkv_bias"] is False
    written = Written(tmp_path / "some.gguf", "qwen2moe", drop=("blk.0.attn_k.bias",))
    with pytest.raises(UnsupportedModelError, match="biases for attn_q, attn_v alone"):
        load_gguf_config(written.path)
    sizes = {"attn_q": Q, "attn_k": KV, "attn_v": KV, "attn_output": HIDDEN}
    extra = {f"blk.0.{part}.bias": np.zeros(size) for part, size in sizes.items()}
    written = Written(tmp_path / "mixtral.gguf", "mixtral", extra=extra)
    with pytest.raises(UnsupportedModelError, match="with biases .* Mixtral model, .* has none"):
        load_gguf_config(written.path)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen2moe", "mixtral"])
def test_skipped_tensors_are_not_decoded(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skip(name: str) -> bool:
        return ".experts.1." in name

    written = Written(tmp_path / "m.gguf", arch, "Q8_0")
    whole = dict(iter_gguf_tensors(written.path, torch.float16))
    decoded: list[int] = []
    decode = minisgl.models.gguf._decode_into

    def count(out: torch.Tensor, *args: Any) -> None:
        decoded.append(out.numel())
        decode(out, *args)

    monkeypatch.setattr("minisgl.models.gguf._decode_into", count)
    for name, tensor in iter_gguf_tensors(written.path, torch.float16, skip=skip):
        assert tensor.is_meta == skip(name)
        assert (tensor.shape, tensor.dtype) == (whole[name].shape, torch.float16)
        assert tensor.is_meta or torch.equal(tensor, whole[name])
    assert decoded == [tensor.numel() for name, tensor in whole.items() if not skip(name)]
    assert len(decoded) == len(whole) - 2 * 3
