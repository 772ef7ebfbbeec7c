"""The machine's ceilings, measured where the engine runs, and what a model's tokens need."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from minisgl.models import ModelConfig

__all__ = [
    "Ceilings",
    "attention_flops",
    "copy_bandwidth",
    "gemm_rate",
    "head_flops",
    "measure_ceilings",
    "read_bandwidth",
    "read_share",
    "step_weights",
    "token_flops",
]

_ALL = 1 << 40
"""Tokens that choose every expert."""
_CALLS = 10
"""Timed at once on a GPU, where starting a call and waiting for it takes a part of its time."""


class Ceilings(NamedTuple):
    """What no kernel of a machine can pass."""

    bytes_per_s: float
    """of a copy from memory to memory, what is read and what is written both counted"""
    flops_per_s: float
    """of a product of large matrices"""


@functools.cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Both ceilings, measured once in a process, with arrays far larger than any cache.

    A CPU's are smaller, to save time.
    """
    on_cpu = device.type == "cpu"
    ceilings = Ceilings(
        copy_bandwidth(device, size_bytes=1 << 28 if on_cpu else 1 << 30),
        gemm_rate(device, dtype, size=1024 if on_cpu else 8192),
    )
    if not on_cpu:
        torch.cuda.empty_cache()
    return ceilings


def read_bandwidth(device: torch.device, *, size_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes per second at which the device streams through memory once, the best of `repeats`.

    The maximum of float64 numbers, in a buffer far larger than any cache: of torch's ops it is
    the one that reads fastest on a CPU (a matrix-vector product reaches 60% of it).
    """
    numbers = torch.ones(size_bytes // 8, dtype=torch.float64, device=device)
    return numbers.numel() * 8 / _best_s(lambda: numbers.max(), device, repeats)


def copy_bandwidth(device: torch.device, *, size_bytes: int = 1 << 30, repeats: int = 5) -> float:
    """Bytes per second, read and written, of copying an array, the best of `repeats`."""
    source = torch.empty(size_bytes // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device, repeats)


def gemm_rate(
    device: torch.device, dtype: torch.dtype, *, size: int = 2048, repeats: int = 5
) -> float:
    """Operations per second of a product of two `[size, size]` matrices, the best of `repeats`.

    Of random numbers: a GPU multiplies ones with less power, and so with a higher clock.
    """
    left, right = torch.randn(2, size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_s(lambda: left @ right, device, repeats)


def token_flops(config: ModelConfig) -> int:
    """Operations of one token in all matrices of the layers: two for each parameter used."""
    return 2 * round(_layer_weights(config, config.num_experts_per_tok))


def step_weights(config: ModelConfig, num_tokens: int) -> float:
    """Weights that a step of so many tokens reads: all matrices of the layers, and the head.

    Of experts, those that some token chose: if each of T tokens chooses k of E evenly, one stays
    out with probability `(1 - k / E)^T`. The one that every token passes is always read.
    """
    used = 0.0
    if config.num_experts:
        share = config.num_experts_per_tok / config.num_experts
        used = config.num_experts * (1 - (1 - share) ** num_tokens)
    return _layer_weights(config, used) + config.hidden_size * config.vocab_size


def read_share(config: ModelConfig, num_tokens: int) -> float:
    """Of all weights but those looked up, the part that a step of so many tokens reads.

    Of bytes it is the same only where experts and the rest are stored in one type.
    """
    return step_weights(config, num_tokens) / step_weights(config, _ALL)


def _layer_weights(config: ModelConfig, num_experts: float) -> float:
    """Weights in all matrices of the layers, with so many experts in each sparse one."""
    hidden, heads = config.hidden_size, config.num_qo_heads
    attention = hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    dense = 3 * hidden * config.intermediate_size
    inner = num_experts * config.moe_intermediate_size + config.shared_expert_intermediate_size
    routed = config.num_experts + (config.shared_expert_intermediate_size > 0)
    sparse = hidden * (routed + 3 * inner)
    mlps = sum(sparse if config.is_sparse(i) else dense for i in range(config.num_layers))
    return config.num_layers * attention + mlps


def head_flops(config: ModelConfig) -> int:
    """Operations that the logits of one row take."""
    return 2 * config.hidden_size * config.vocab_size


def attention_flops(config: ModelConfig, first: int, end: int) -> int:
    """Operations of scores and weighted values for the queries at positions `first` to `end - 1`.

    A query sees itself and what comes before it, in a layer with a window at most that many.
    """
    windows = Counter(config.layer_window(layer) or end for layer in range(config.num_layers))
    total = sum(
        layers * sum(min(position + 1, window) for position in range(first, end))
        for window, layers in windows.items()
    )
    return 4 * config.num_qo_heads * config.head_dim * total


def _best_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call, the least of `repeats` measurements after a first one."""
    best = float("inf")
    calls = _CALLS if device.type == "cuda" else 1
    for index in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(device)
        if index:
            best = min(best, (time.perf_counter() - start) / calls)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
