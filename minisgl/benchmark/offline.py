"""`minisgl bench offline`: workloads through the scheduler and engine of this process.

The limit it is held against: a decode step must read every weight once (the embedding only if
it is the head too), so with bandwidth W and weights of S bytes no engine makes more than W / S
steps a second. The share reached is the time those reads need over the time taken.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from minisgl.config import EngineConfig
from minisgl.core import Req, SamplingParams
from minisgl.errors import ConfigError
from minisgl.llm import LLM

from .limits import read_bandwidth
from .timing import percentiles
from .workloads import Job, make_workload

__all__ = ["bench_offline"]


def bench_offline(
    model: str, config: EngineConfig, *, workloads: list[str], repeats: int, compare: bool
) -> dict[str, Any]:
    """Run each workload `repeats` times after a warm-up; figures are of the median run.

    With `compare`, `transformers` runs the same jobs in turn with the engine, run by run, so
    that both meet the same machine.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats = {repeats} must be at least 1")
    with LLM(model, **vars(config)) as llm:
        engine = llm.engine
        other = None
        if compare:
            from .transformers_runner import TransformersRunner

            other = TransformersRunner(model, engine.config.dtype, engine.config.device)
        weights = _weights_read_bytes(llm)
        bandwidth = read_bandwidth(engine.config.device)
        rows = []
        for name in workloads:
            jobs = make_workload(name, engine.model_config.vocab_size)
            longest = max(len(job.prompt) + job.output_len for job in jobs)
            if longest > llm.max_model_len:
                raise ConfigError(
                    f"--workload {name} has sequences of {longest} tokens; this model runs up to "
                    f"{llm.max_model_len} here (--max-model-len)"
                )
            _run(llm, [Job(job.prompt[:32], 4) for job in jobs])
            runs, others = [], []
            for _ in range(repeats):
                runs.append(_run(llm, jobs))
                if other is not None:
                    others.append(other.run(jobs))
            row = _figures(name, jobs, _median(runs), weights / bandwidth)
            if other is not None:
                row["transformers"] = _compared(jobs, row, others)
            rows.append(row)
        return {
            "model": model,
            "dtype": str(engine.config.dtype).removeprefix("torch."),
            "device": str(engine.config.device),
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "repeats": repeats,
            "weight_bytes_read": weights,
            "read_gb_per_s": round(bandwidth / 1e9, 1),
            "workloads": rows,
        }


class _Run:
    """Times of one run in seconds since its start."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[float]] = [[] for _ in range(count)]
        self.steps = 0
        self.computed_tokens = 0
        self.total_s = 0.0


def _run(llm: LLM, jobs: list[Job]) -> _Run:
    """All jobs at once, beginning with an empty prefix cache."""
    scheduler, run = llm.scheduler, _Run(len(jobs))
    scheduler.flush_cache()
    before = replace(scheduler.stats)
    params = SamplingParams(temperature=0.0, ignore_eos=True).resolve_defaults({})
    start = time.perf_counter()
    for uid, job in enumerate(jobs):
        length = len(job.prompt)
        scheduler.add(
            Req(
                uid=uid,
                token_ids=list(job.prompt),
                prompt_len=length,
                params=params,
                max_len=length + job.output_len,
            )
        )
    while scheduler.has_work:
        updates = scheduler.step()
        now = time.perf_counter() - start
        for update in updates:
            if update.token_id is not None:
                run.tokens[update.uid].append(now)
    run.total_s = time.perf_counter() - start
    run.steps = scheduler.stats.num_steps - before.num_steps
    run.computed_tokens = scheduler.stats.num_prefill_tokens - before.num_prefill_tokens
    for job, times in zip(jobs, run.tokens, strict=True):
        if len(times) != job.output_len:
            raise ConfigError(
                f"a request of {len(job.prompt)} + {job.output_len} tokens does not fit "
                f"--max-model-len {llm.max_model_len}"
            )
    return run


def _median(runs: list[_Run]) -> _Run:
    return sorted(runs, key=lambda run: run.total_s)[len(runs) // 2]


def _figures(name: str, jobs: list[Job], run: _Run, step_limit_s: float) -> dict[str, Any]:
    prompts, outputs = sum(len(j.prompt) for j in jobs), sum(j.output_len for j in jobs)
    ttft = [times[0] for times in run.tokens]
    gaps = [b - a for times in run.tokens for a, b in zip(times, times[1:], strict=False)]
    tpot = [(t[-1] - t[0]) / (len(t) - 1) for t in run.tokens if len(t) > 1]
    figures: dict[str, Any] = {
        "workload": name,
        "requests": len(jobs),
        "prompt_tokens": prompts,
        "computed_prompt_tokens": run.computed_tokens,
        "output_tokens": outputs,
        "total_s": round(run.total_s, 3),
        "prompt_tok_s": round(prompts / run.total_s, 1),
        "output_tok_s": round(outputs / run.total_s, 1),
        "steps": run.steps,
        "bandwidth_limit_share": round(run.steps * step_limit_s / run.total_s, 3),
    }
    if len(jobs) == 1 and tpot:
        figures["decode_tok_s"] = round(1 / tpot[0], 1)
    for label, values in (
        ("ttft", ttft),
        ("tpot", tpot),
        ("itl", gaps),
        ("e2e", [times[-1] for times in run.tokens]),
    ):
        if values:
            figures[f"{label}_ms"] = percentiles([value * 1000 for value in values])
    return figures


def _compared(jobs: list[Job], row: dict[str, Any], seconds: list[float]) -> dict[str, float]:
    total = statistics.median(seconds)
    outputs = sum(job.output_len for job in jobs)
    return {
        "total_s": round(total, 3),
        "output_tok_s": round(outputs / total, 1),
        "times_faster": round(total / row["total_s"], 2),
    }


def _weights_read_bytes(llm: LLM) -> int:
    config = llm.engine.model_config
    weights = llm.engine.model.state_dict()
    size = sum(t.numel() * t.element_size() for t in weights.values())
    if not config.tie_word_embeddings:  # only looked up, a row a token
        table = weights["model.embed_tokens.weight"]
        size -= table.numel() * table.element_size()
    return size
