"""One worker: it holds the model, the KV pool and the page table, and runs batches.

Owns: memory sizing (`memory.py`), the forward of a batch (`engine.py`), the choice of tokens
(`sampler.py`). Does not own: which requests run and which pages they have (`scheduler/`).
Invariant: `launch(batch)` changes only the KV slots and token-pool entries of the batch's own
requests.
Read next: `engine.py`, then `minisgl/scheduler/`.
"""

from __future__ import annotations

from .engine import Engine
from .sampler import Sampler

__all__ = ["Engine", "Sampler"]
