"""Tokens from logits by the native kernels; `csrc/sample.h` says how."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .build import library
from .pool import ThreadPool, free_with

__all__ = ["NativeDrawer"]


class _Draws(ctypes.Structure):
    """The C struct of `csrc/sample.h`, field by field."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "temperature", "top_k", "top_p", "min_p")),
        ("uniform", ctypes.c_void_p),
    ]


class NativeDrawer:
    """Draws as `kernel/sampling.py` does, without a sort; a row is one thread's.

    Results of a row are the same bits whatever the other rows and the number of threads. The
    token of a row with a NaN or +inf, or with nothing above -inf, is 0.
    """

    def __init__(self, pool: ThreadPool, vocab_size: int) -> None:
        """`pool` may be other kernels' too, between their calls."""
        self._native = library()
        self._pool = pool
        self._vocab_size = vocab_size
        self._native.minisgl_drawer.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(
            self._native.minisgl_drawer(ctypes.c_int(pool.threads), ctypes.c_int64(vocab_size))
        )
        free_with(self, self._native.minisgl_drawer_free, self._handle)

    def uniform(
        self, seeds: np.ndarray, positions: np.ndarray, choices: np.ndarray
    ) -> torch.Tensor:
        """`sampling.philox_uniform` of int64 `[b]` each: `[b]` float64, the same bits."""
        count = len(seeds)
        out = torch.empty(count, dtype=torch.float64)
        self._native.minisgl_uniform(
            _pointer(seeds, np.int64, count, "seeds"),
            _pointer(positions, np.int64, count, "positions"),
            _pointer(choices, np.int64, count, "choices"),
            ctypes.c_int64(count),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        temperature: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """One token for each of `rows [b]` int64 of `logits [B, V]` float32: `[b]` int64.

        `temperature`, `top_p`, `min_p [b]` are float32, `top_k [b]` is int64 (below 1, or V and
        more: off), `uniform [b]` float64 in [0, 1).
        """
        count = len(rows)
        if logits.dtype != torch.float32 or logits.shape[1:] != (self._vocab_size,):
            raise ValueError(
                f"logits are {tuple(logits.shape)} {logits.dtype}: they must be float32 "
                f"[B, {self._vocab_size}]"
            )
        if logits.stride(1) != 1 and self._vocab_size > 1:
            raise ValueError(f"logits have strides {logits.stride()}: rows must be contiguous")
        if any(not 0 <= row < logits.shape[0] for row in rows.tolist()):
            raise ValueError(f"rows are {rows.tolist()}: there are {logits.shape[0]} of logits")
        draws = _Draws(
            count=count,
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=_pointer(rows, np.int64, count, "rows"),
            temperature=_pointer(temperature, np.float32, count, "temperature"),
            top_k=_pointer(top_k, np.int64, count, "top_k"),
            top_p=_pointer(top_p, np.float32, count, "top_p"),
            min_p=_pointer(min_p, np.float32, count, "min_p"),
            uniform=_pointer(uniform.numpy(), np.float64, count, "uniform"),
        )
        tokens = torch.empty(count, dtype=torch.int64)
        self._native.minisgl_draw(
            self._handle, self._pool.handle, ctypes.byref(draws), ctypes.c_void_p(tokens.data_ptr())
        )
        return tokens


def _pointer(array: np.ndarray, dtype: type[np.generic], count: int, name: str) -> ctypes.c_void_p:
    if array.dtype != dtype or array.shape != (count,) or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.shape} {array.dtype} with strides {array.strides}: it must be a "
            f"contiguous [{count}] {np.dtype(dtype)}"
        )
    return ctypes.c_void_p(array.__array_interface__["data"][0])
