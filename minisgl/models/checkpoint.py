"""What a model on disk says of itself: its config and its generation defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minisgl.config import ModelFacts
from minisgl.errors import ModelNotFoundError
from minisgl.layers.rotary import rope_type
from minisgl.utils.hf import is_gguf, read_json
from minisgl.utils.torch_utils import parse_dtype

from .config import ModelConfig, token_ids

__all__ = ["ModelInfo", "load_model_config", "load_model_info"]


@dataclass(frozen=True)
class ModelInfo:
    """A model's config with what the files around it add."""

    config: ModelConfig
    dtype: torch.dtype
    """The type the weights were published in; bfloat16 for quantized files."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """`generation_config.json`, or empty."""
    eos_token_ids: frozenset[int] = frozenset()
    """The EOS ids of the config and of the generation config together."""

    def facts(self) -> ModelFacts:
        """What `minisgl.config.resolve` needs of it."""
        rotary = self.config.rotary_config
        return ModelFacts(self.dtype, rotary.max_context, rope_type(rotary.scaling))


def load_model_config(model_path: str) -> ModelConfig:
    """The config of a folder with `config.json` or of a GGUF file."""
    return ModelConfig.from_hf(SimpleNamespace(**_read_config(model_path)))


def load_model_info(model_path: str) -> ModelInfo:
    """Everything the files say that isn't weights or tokenizer."""
    raw = _read_config(model_path)
    config = ModelConfig.from_hf(SimpleNamespace(**raw))
    generation_file = Path(model_path) / "generation_config.json"
    defaults = read_json(generation_file) if generation_file.is_file() else {}
    stored = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    return ModelInfo(
        config=config,
        dtype=parse_dtype(str(stored)),
        generation_defaults=defaults,
        eos_token_ids=frozenset(config.eos_token_ids + token_ids(defaults.get("eos_token_id"))),
    )


def _read_config(model_path: str) -> dict[str, Any]:
    if is_gguf(model_path):
        from .gguf import load_gguf_config

        return load_gguf_config(model_path)
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{model_path} has no config.json and is not a GGUF file")
    return read_json(file)
