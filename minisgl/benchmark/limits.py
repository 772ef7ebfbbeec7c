"""The machine's ceilings, measured where the engine runs, and what a model's tokens need."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from minisgl.models import ModelConfig

__all__ = ["attention_flops", "gemm_rate", "head_flops", "read_bandwidth", "token_flops"]


def read_bandwidth(device: torch.device, *, size_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Bytes per second at which the device streams through memory once, the best of `repeats`.

    The maximum of float64 numbers, in a buffer far larger than any cache: of torch's ops it is
    the one that reads fastest on a CPU (a matrix-vector product reaches 60% of it).
    """
    numbers = torch.ones(size_bytes // 8, dtype=torch.float64, device=device)
    return numbers.numel() * 8 / _best_s(lambda: numbers.max(), device, repeats)


def gemm_rate(
    device: torch.device, dtype: torch.dtype, *, size: int = 2048, repeats: int = 5
) -> float:
    """Operations per second of a product of two `[size, size]` matrices, the best of `repeats`."""
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_s(lambda: left @ right, device, repeats)


def token_flops(config: ModelConfig) -> int:
    """Operations of one token in all matrices of the layers: two for each parameter used."""
    hidden, heads = config.hidden_size, config.num_qo_heads
    attention = hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    dense = 3 * hidden * config.intermediate_size
    chosen = config.num_experts_per_tok * config.moe_intermediate_size
    sparse = hidden * (config.num_experts + 3 * chosen)
    mlps = sum(sparse if config.is_sparse(i) else dense for i in range(config.num_layers))
    return 2 * (config.num_layers * attention + mlps)


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
    """Seconds of the fastest of `repeats` calls after a first one."""
    best = float("inf")
    for index in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        if index:
            best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
