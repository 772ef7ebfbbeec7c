"""`minisgl bench offline --suite cpu`: four workloads, each figure beside its limit.

    a  single    decode tok/s of one request           weights read once a token
    b  prefill   tok/s of a prompt of 1,024 tokens     the matrices' and attention's operations
    c  batch     output tok/s of 32 requests           by step: the longer of both
    d  prefix    seconds for 32 that share 512 tokens  by step: the longer of both

The limits are those of the machine: how fast it reads memory, and how fast torch multiplies large
matrices in the type of the computation. Keys and values that are read count in none of them, so
they can't quite be reached; kernels that multiply in fewer bits than torch's can pass that of b.
Of experts, those count that some token chose, if tokens choose evenly.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import fields
from typing import Any

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.utils.hf import resolve_model_path

from .limits import (
    attention_flops,
    gemm_rate,
    head_flops,
    read_bandwidth,
    read_share,
    token_flops,
)
from .offline import Run, machine_figures, median_run, run_jobs, weights_read_bytes
from .workloads import Job, make_workload

__all__ = ["bench_cpu_suite", "config_flags", "first_token_s"]

ROWS = {
    "single": ("a", "decode tok/s"),
    "prefill": ("b", "prefill tok/s"),
    "batch": ("c", "output tok/s"),
    "prefix": ("d", "seconds"),
}
_STARTS = 3


def bench_cpu_suite(model: str, config: EngineConfig, *, repeats: int) -> dict[str, Any]:
    """Run all four `repeats` times after a warm-up and measure the machine's limits.

    Raises `ConfigError` off the CPU, and for a model whose context is too short.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats = {repeats} must be at least 1")
    resolve_model_path(model)  # raises where there is none, before a process is started for it
    start_s = first_token_s(model, config)  # first: nothing else is in memory yet
    with LLM(model, **vars(config)) as llm:
        resolved = llm.engine.config
        if resolved.device.type != "cpu":
            raise ConfigError(f"--suite cpu measures the CPU, not {resolved.device}: --device cpu")
        limits = _Limits(llm)
        return {
            "benchmark": "suite cpu",
            "model": model,
            **machine_figures(llm),
            "quantization": resolved.quantization,
            "kv_dtype": str(resolved.kv_dtype).removeprefix("torch."),
            "native": resolved.native,
            "deterministic": resolved.native,
            "repeats": repeats,
            "weight_bytes_read": limits.weight_bytes,
            "read_gb_per_s": round(limits.bandwidth / 1e9, 1),
            "gemm_gflop_per_s": round(limits.gemm_rate / 1e9),
            "first_token_s": round(start_s, 2),
            "rows": _rows(llm, limits, repeats),
        }


def first_token_s(model: str, config: EngineConfig) -> float:
    """Seconds from the start of `minisgl generate` to its first byte of output.

    The median of some fresh processes, after one that warms the file cache.
    """
    command = [sys.executable, "-m", "minisgl", "generate", "--model", model, "--max-tokens", "1"]
    command += ["--temperature", "0", "--log-level", "error", *config_flags(config), "Hello"]
    seconds = []
    for _ in range(_STARTS + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds.append(time.perf_counter() - start)
            _, said = process.communicate()
        if process.returncode != 0:
            raise ConfigError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")
    return statistics.median(seconds[1:])


def config_flags(config: EngineConfig) -> list[str]:
    """The flags that make this configuration of the default one."""
    flags = []
    for item in fields(config):
        value = getattr(config, item.name)
        if value == item.default:
            continue
        name = item.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


class _Limits:
    """What the machine does at most, in bytes and operations a second, and what the model needs."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        self.weight_bytes = weights_read_bytes(llm)
        self.bandwidth = read_bandwidth(engine.config.device)
        self.gemm_rate = gemm_rate(engine.config.device, engine.config.dtype)
        self.model = engine.model_config

    def step_s(self, num_tokens: int) -> float:
        """The time in which the weights that such a step needs can be read."""
        return read_share(self.model, num_tokens) * self.weight_bytes / self.bandwidth

    def run_s(self, run: Run, jobs: list[Job]) -> float:
        """The least time for the steps of this run: of each, reads or operations, the longer.

        The operations of attention are spread evenly over the tokens.
        """
        attention = sum(
            attention_flops(self.model, cached, len(job.prompt) + job.output_len - 1)
            for job, cached in zip(jobs, run.cached_tokens, strict=True)
        )
        per_token = token_flops(self.model) + attention / sum(s.computed for s in run.steps)
        per_sample = head_flops(self.model)
        seconds = 0.0
        for step in run.steps:
            flops = step.computed * per_token + step.sampled * per_sample
            seconds += max(self.step_s(step.computed), flops / self.gemm_rate)
        return seconds


def _rows(llm: LLM, limits: _Limits, repeats: int) -> list[dict[str, Any]]:
    """All workloads in turn, `repeats` times."""
    loads = {name: make_workload(name, limits.model.vocab_size) for name in ROWS}
    longest = max(len(job.prompt) + job.output_len for jobs in loads.values() for job in jobs)
    if longest > llm.max_model_len:
        raise ConfigError(
            f"--suite cpu has sequences of {longest} tokens; this model runs up to "
            f"{llm.max_model_len} here (--max-model-len)"
        )
    for jobs in loads.values():
        run_jobs(llm, [Job(job.prompt[:32], 4) for job in jobs])
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    for _ in range(repeats):
        for name, jobs in loads.items():
            runs[name].append(run_jobs(llm, jobs))
    return [_row(name, jobs, median_run(runs[name]), limits) for name, jobs in loads.items()]


def _row(name: str, jobs: list[Job], run: Run, limits: _Limits) -> dict[str, Any]:
    """One workload: its figure, what the figure is at the machine's limit, and the share of it."""
    letter, unit = ROWS[name]
    figure, limit_s = _figure(name, jobs, run), limits.run_s(run, jobs)
    if name == "single":
        limit = 1 / limits.step_s(1)
        share = figure / limit
    else:
        limit = limit_s if name == "prefix" else figure * run.total_s / limit_s
        share = limit_s / run.total_s
    return {
        "row": letter,
        "workload": name,
        "unit": unit,
        "figure": round(figure, 2),
        "limit": round(limit, 2),
        "share": round(share, 3),
        "total_s": round(run.total_s, 3),
        "steps": len(run.steps),
    }


def _figure(name: str, jobs: list[Job], run: Run) -> float:
    """What the row shows, in its unit."""
    if name == "single":
        return run.decode_tok_s
    if name == "prefill":
        return sum(len(job.prompt) for job in jobs) / run.total_s
    if name == "batch":
        return sum(job.output_len for job in jobs) / run.total_s
    return run.total_s
