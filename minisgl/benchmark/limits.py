"""The machine's ceilings, measured where the engine runs."""

from __future__ import annotations

import time

import torch

__all__ = ["read_bandwidth"]


def read_bandwidth(device: torch.device, *, size_bytes: int = 1 << 30, repeats: int = 5) -> float:
    """Bytes per second at which the device streams through memory once, the best of `repeats`.

    A matrix-vector product in float32 reads every byte once, as decoding reads the weights;
    the buffer is far larger than any cache.
    """
    rows = size_bytes // (4 * 4096)
    matrix = torch.ones(rows, 4096, device=device)
    vector = torch.ones(4096, device=device)
    best = float("inf")
    for _ in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        torch.mv(matrix, vector)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return matrix.numel() * 4 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
