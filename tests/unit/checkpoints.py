"""Tiny checkpoints of published configs, and loading them as the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model, load_weight
from minisgl.utils import torch_dtype
from tools.make_checkpoint import make_checkpoint

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 4, "vocab_size": 131, "max_position_embeddings": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
}  # fmt: skip
Edit = Callable[[dict[str, torch.Tensor]], None]
LAYER = "model.layers.1"


def config_of(name: str = "qwen3-0.6b", **changes: Any) -> dict[str, Any]:
    """A published config, shrunk."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    sizes = TINY if "moe" in raw["model_type"] else {k: TINY[k] for k in list(TINY)[:8]}
    return {**raw, **sizes, **changes}


def checkpoint(folder: Path, edit: Edit | None = None, **changes: Any) -> Path:
    """A tiny checkpoint; `edit` changes its tensors."""
    name = "qwen3-30b-a3b" if changes.pop("moe", False) else "qwen3-0.6b"
    make_checkpoint(config_of(name, **changes), folder, dtype="float32")
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Everything that the loader yields."""
    return dict(load_weight(str(folder), "cpu", dtype=dtype))


def load_into_model(folder: Path) -> Any:
    """What the engine does: build on meta, then load."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(torch.float32):
        model = create_model(ModelConfig.from_hf(SimpleNamespace(**config)))
    model.load_state_dict(load(folder))
    return model
