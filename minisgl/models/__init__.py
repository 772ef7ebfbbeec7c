"""Models and their weights: config, one decoder for all architectures, loaders.

Owns: the shapes of supported models (`config.py`, `decoder.py`, `register.py`), the reading of
checkpoints (`weight.py`, `gguf.py`), each rank's part of them (`shard.py`) and which weights stay
quantized (`quantize.py`). Does not own: the blocks (`layers/`), or memory for the KV cache
(`kvcache/`).
Invariant: the keys and shapes that `load_weight` yields are the model's `state_dict()`, plus at
most the head of a tied model.
Read next: `decoder.py`, then `minisgl/kvcache/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .checkpoint import ModelInfo, load_model_config, load_model_info
    from .config import ModelConfig, RotaryConfig
    from .quantize import plan_storage, set_storage
    from .register import create_model
    from .shard import shard_tensor
    from .weight import load_weight

_EXPORTS = {
    "ModelConfig": "config",
    "RotaryConfig": "config",
    "ModelInfo": "checkpoint",
    "create_model": "register",
    "load_model_config": "checkpoint",
    "load_model_info": "checkpoint",
    "load_weight": "weight",
    "plan_storage": "quantize",
    "set_storage": "quantize",
    "shard_tensor": "shard",
}

__all__ = [
    "ModelConfig",
    "ModelInfo",
    "RotaryConfig",
    "create_model",
    "load_model_config",
    "load_model_info",
    "load_weight",
    "plan_storage",
    "set_storage",
    "shard_tensor",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
