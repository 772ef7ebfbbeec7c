"""Attention backends: they store keys and values in the pool and attend over its pages.

Owns: the metadata of a batch and the choice of kernels for its parts. Does not own: the pool
and its pages (`kvcache/`), or the attention arithmetic (`kernel/`).
Invariant: the result does not depend on page size, on what else is in the batch, or on how a
prompt is cut into chunks, up to the rounding of the dtype.
Read next: `torch_backend.py`, then `minisgl/engine/`.
"""

from __future__ import annotations

from .torch_backend import TorchBackend

__all__ = ["TorchBackend"]
