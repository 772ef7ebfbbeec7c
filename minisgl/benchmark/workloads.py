"""The offline workloads: prompts of random token ids and how many tokens to generate."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["MAX_REFERENCE_REQUESTS", "WORKLOADS", "Job", "make_workload", "reference_workload"]

MAX_REFERENCE_REQUESTS = 256


@dataclass(frozen=True)
class Job:
    """One request: its prompt's ids and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int


def make_workload(name: str, vocab_size: int) -> list[Job]:
    """The jobs of a workload; the same for the same vocabulary."""
    return WORKLOADS[name](np.random.default_rng(0), vocab_size)


def reference_workload(num_requests: int = MAX_REFERENCE_REQUESTS) -> list[Job]:
    """The first jobs of the workload that engines are compared on: 142,827 tokens in, 133,966 out.

    256 requests of 100 to 1024 tokens in and out, drawn in the order that nano-vllm's benchmark
    made a custom: seed 0, each prompt's length and then its ids below 10,001, prompt after prompt,
    then all output lengths.
    """
    rng = random.Random(0)
    prompts = []
    for _ in range(MAX_REFERENCE_REQUESTS):
        length = rng.randint(100, 1024)
        prompts.append([rng.randint(0, 10_000) for _ in range(length)])
    jobs = [Job(prompt, rng.randint(100, 1024)) for prompt in prompts]
    return jobs[:num_requests]


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
