"""`minisgl bench offline --shape`: the workload that engines are compared on, beside its limit.

A model of random weights runs 256 requests of 100 to 1024 tokens in and out at temperature 0.6.
No engine on this machine takes less than the sum of

    weights    each decode step, the longer of reading the weights and of their arithmetic
    KV reads   keys and values of all tokens before it, once for each token that is decoded
    prefill    the prompts' arithmetic, attention included

with memory read as fast as it is copied and arithmetic done as fast as large matrices multiply.
All requests run from the first step on, so step s has those that generate at least s tokens; the
first comes from the prefill, which needs logits only of a prompt's last token.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.models import ModelConfig, load_model_info
from minisgl.scheduler import Scheduler, build_scheduler
from minisgl.server.trace import TraceWriter

from .limits import (
    Ceilings,
    attention_flops,
    head_flops,
    measure_ceilings,
    step_weights,
    token_flops,
)
from .offline import Run, machine_figures, run_jobs, traced
from .shapes import write_shape
from .workloads import MAX_REFERENCE_REQUESTS, Job, reference_workload

__all__ = ["Limit", "bench_shape", "reference_limit"]

PARAMS = SamplingParams(temperature=0.6, ignore_eos=True)
MAX_MODEL_LEN, MAX_PREFILL_LENGTH, MAX_RUNNING = 4096, 16_384, 256
"""Used where the user names none."""
WARM_UP = 32
"""Requests before the first timed run, and the tokens that each generates."""


class Limit(NamedTuple):
    """The least time that a machine needs for a workload."""

    weights_s: float
    kv_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.prefill_s


class _Loaded(NamedTuple):
    """A scheduler with its engine: a `Runner` without a tokenizer."""

    scheduler: Scheduler
    engine: Engine
    max_model_len: int


def bench_shape(
    shape: str,
    config: EngineConfig,
    *,
    num_requests: int,
    repeats: int,
    trace: TraceWriter | None = None,
) -> dict[str, Any]:
    """Run the first `num_requests` of the workload `repeats` times after a warm-up.

    With `config.deterministic`, an engine without it runs the same afterwards, which isn't
    traced. Raises `ConfigError` for numbers out of range and for a context too short.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats = {repeats} must be at least 1")
    if not 1 <= num_requests <= MAX_REFERENCE_REQUESTS:
        raise ConfigError(f"--requests = {num_requests} must be 1 to {MAX_REFERENCE_REQUESTS}")
    config = _with_defaults(config)
    jobs = reference_workload(num_requests)
    found = _measure(shape, config, jobs, repeats, trace)
    if config.deterministic:
        other = _measure(shape, replace(config, deterministic=False), jobs, repeats)
        found["not_deterministic"] = other["runs"]
        found["deterministic_price"] = round(1 - _best(found["runs"]) / _best(other["runs"]), 4)
    return found


def reference_limit(
    config: ModelConfig, jobs: list[Job], ceilings: Ceilings, itemsize: int
) -> Limit:
    """The least time for these jobs, with weights, keys and values of `itemsize` bytes each.

    Every layer attends to all tokens; tokens choose their experts evenly.
    """
    prompts = np.array([len(job.prompt) for job in jobs])
    outputs = np.array([job.output_len for job in jobs])
    layers_flops, row_flops = token_flops(config), head_flops(config)
    weights_s = 0.0
    for step in range(2, outputs.max() + 1):
        live = int((outputs >= step).sum())
        read_s = step_weights(config, live) * itemsize / ceilings.bytes_per_s
        weights_s += max(read_s, live * (layers_flops + row_flops) / ceilings.flops_per_s)
    # Step s reads its prompt and s - 1 tokens more, the one just fed among them; s = 2 ... output.
    keys = int(((outputs - 1) * prompts + (outputs - 1) * outputs // 2).sum())
    key_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    attention = sum(attention_flops(config, 0, length) for length in prompts.tolist())
    prefill = int(prompts.sum()) * layers_flops + len(jobs) * row_flops + attention
    return Limit(weights_s, keys * key_bytes / ceilings.bytes_per_s, prefill / ceilings.flops_per_s)


def _with_defaults(config: EngineConfig) -> EngineConfig:
    """Random weights, and the workload's limits where the user names none that rules them out."""
    budget = config.max_prefill_length or max(MAX_PREFILL_LENGTH, config.max_running_requests or 0)
    return replace(
        config,
        load_format="dummy",
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        max_prefill_length=budget,
        max_running_requests=config.max_running_requests or min(MAX_RUNNING, budget),
    )


def _measure(
    shape: str,
    config: EngineConfig,
    jobs: list[Job],
    repeats: int,
    trace: TraceWriter | None = None,
) -> dict[str, Any]:
    """One engine: its figures, and those of each run."""
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        built = build_scheduler(folder, load_model_info(folder), config)
    loaded = _Loaded(built.scheduler, built.engine, built.engine.plan.max_model_len)
    resolved, model, machine = built.config, built.engine.model_config, machine_figures(loaded)
    try:
        with traced(loaded, trace):
            runs = _run(loaded, jobs, repeats)
    finally:
        built.close()
        del built, loaded
        gc.collect()  # the memory of one engine is needed for the next
        torch.cuda.empty_cache()
    # Only now: beside the pool there may be no room for the arrays that are copied.
    ceilings = measure_ceilings(resolved.device, resolved.dtype)
    if resolved.device.type == "cuda":  # each rank has a GPU; on a CPU all share the memory
        ceilings = Ceilings(*(resolved.tp * rate for rate in ceilings))
    limit = reference_limit(model, jobs, ceilings, resolved.dtype.itemsize)
    outputs = sum(job.output_len for job in jobs)
    return {
        "benchmark": "shape",
        "shape": shape,
        **machine,
        "deterministic": resolved.deterministic,
        "requests": len(jobs),
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "output_tokens": outputs,
        "copy_gb_per_s": round(ceilings.bytes_per_s / 1e9, 1),
        "gemm_tflop_per_s": round(ceilings.flops_per_s / 1e12, 3),
        "limit_tok_s": round(outputs / limit.total_s, 1),
        "limit_s": {
            "weights": round(limit.weights_s, 4),
            "kv_reads": round(limit.kv_s, 4),
            "prefill": round(limit.prefill_s, 4),
        },
        "runs": [
            {
                "output_tok_s": round(outputs / run.total_s, 1),
                "total_s": round(run.total_s, 3),
                "steps": len(run.steps),
                "share": round(limit.total_s / run.total_s, 4),
            }
            for run in runs
        ],
    }


def _run(loaded: _Loaded, jobs: list[Job], repeats: int) -> list[Run]:
    longest = max(len(job.prompt) + job.output_len for job in jobs)
    if longest > loaded.max_model_len:
        raise ConfigError(
            f"--shape has sequences of {longest} tokens; this engine runs up to "
            f"{loaded.max_model_len} (--max-model-len)"
        )
    warm_up = [Job(job.prompt, min(job.output_len, WARM_UP)) for job in jobs[:WARM_UP]]
    run_jobs(loaded, warm_up, PARAMS)
    return [run_jobs(loaded, jobs, PARAMS) for _ in range(repeats)]


def _best(runs: list[dict[str, Any]]) -> float:
    best: float = max(run["output_tok_s"] for run in runs)
    return best
