"""What the engine asks of a model."""

from __future__ import annotations

from abc import abstractmethod

import torch

from minisgl.layers import BaseOP

__all__ = ["BaseLLMModel"]


class BaseLLMModel(BaseOP):
    """A model that reads the current batch from the global context."""

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Logits `[size, vocab_size]` of each request's next token."""
