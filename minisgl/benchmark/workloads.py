"""The offline workloads: prompts of random token ids and how many tokens to generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["WORKLOADS", "Job", "make_workload"]


@dataclass(frozen=True)
class Job:
    """One request: its prompt's ids and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int


def make_workload(name: str, vocab_size: int) -> list[Job]:
    """The jobs of a workload; the same for the same vocabulary."""
    return WORKLOADS[name](np.random.default_rng(0), vocab_size)


def _single(rng: np.random.Generator, vocab: int) -> list[Job]:
    return [Job(rng.integers(0, vocab, 64).tolist(), 128)]


def _prefill(rng: np.random.Generator, vocab: int) -> list[Job]:
    return [Job(rng.integers(0, vocab, 1024).tolist(), 1)]


def _batch(rng: np.random.Generator, vocab: int) -> list[Job]:
    lengths = rng.integers(32, 257, size=(32, 2)).tolist()
    return [Job(rng.integers(0, vocab, i).tolist(), o) for i, o in lengths]


def _prefix(rng: np.random.Generator, vocab: int) -> list[Job]:
    shared = rng.integers(0, vocab, 512).tolist()
    return [Job(shared + rng.integers(0, vocab, 32).tolist(), 32) for _ in range(32)]


WORKLOADS: dict[str, Callable[[np.random.Generator, int], list[Job]]] = {
    "single": _single,
    "prefill": _prefill,
    "batch": _batch,
    "prefix": _prefix,
}
