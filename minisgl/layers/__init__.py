"""The building blocks of the models: named weights around the ops of `minisgl/kernel/`.

Owns: which weights exist, their names and shapes on this rank. Does not own: values (they are
loaded by `models/weight.py`), the KV cache, or what an op computes.
Invariant: `state_dict()` of a block is exactly what a checkpoint must bring for it.
Read next: `base.py`, then `minisgl/models/decoder.py`.
"""

from __future__ import annotations

from .activation import get_gated_activation
from .attention import AttentionLayer
from .base import BaseOP, OPList, StateLessOP
from .embedding import ParallelLMHead, VocabParallelEmbedding
from .linear import (
    LinearColParallelMerged,
    LinearOProj,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
    local_heads,
)
from .moe import MoELayer
from .norm import RMSNorm, RMSNormFused
from .quantized import QuantizedWeight, WeightPart
from .rotary import RotaryEmbedding, get_rope, set_rope_device

__all__ = [
    "AttentionLayer",
    "BaseOP",
    "LinearColParallelMerged",
    "LinearOProj",
    "LinearQKVMerged",
    "LinearReplicated",
    "LinearRowParallel",
    "MoELayer",
    "OPList",
    "ParallelLMHead",
    "QuantizedWeight",
    "RMSNorm",
    "RMSNormFused",
    "RotaryEmbedding",
    "StateLessOP",
    "VocabParallelEmbedding",
    "WeightPart",
    "get_gated_activation",
    "get_rope",
    "local_heads",
    "set_rope_device",
]
