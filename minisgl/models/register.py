"""Which architectures the decoder builds, and with which switches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from minisgl.errors import UnsupportedModelError
from minisgl.utils import Registry

from .base import BaseLLMModel
from .config import ModelConfig
from .decoder import CausalLM

__all__ = ["MODELS", "create_model"]

MODELS: Registry[Callable[[ModelConfig], BaseLLMModel]] = Registry(
    "architecture", UnsupportedModelError
)
for _name in (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
):
    MODELS.register(_name, CausalLM)
for _name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
    MODELS.register(_name, partial(CausalLM, has_qk_norm=True))


def create_model(config: ModelConfig) -> BaseLLMModel:
    """The model of `config.architectures[0]`, on the current device and default dtype.

    Build it under `torch.device("meta")`: that takes milliseconds and no memory.
    """
    if not config.architectures:
        raise UnsupportedModelError(
            f"The model's config names no architecture; supported: {', '.join(MODELS.names())}"
        )
    return MODELS[config.architectures[0]](config)
