"""`minisgl bench offline`: workloads through the scheduler and engine of this process.

The limit it is held against: a decode step must read every weight once (the embedding only if
it is the head too), so with bandwidth W and weights of S bytes no engine makes more than W / S
steps a second. Of experts it reads those that a token chose: as many as even choices would make.
The share reached is the time those reads need over the time taken.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from minisgl.config import EngineConfig
from minisgl.core import Req, SamplingParams
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.scheduler import Scheduler
from minisgl.scheduler.recorder import StepRecorder
from minisgl.server.trace import TraceWriter

from .limits import read_bandwidth, read_share
from .timing import percentiles
from .workloads import Job, make_workload

__all__ = [
    "Runner",
    "Run",
    "Step",
    "bench_offline",
    "machine_figures",
    "median_run",
    "run_jobs",
    "traced",
    "weights_read_bytes",
]


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Runner(Protocol):
    """What jobs run on: an `LLM`, or a scheduler with its engine and no tokenizer."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def max_model_len(self) -> int: ...


@contextmanager
def traced(runner: Runner, trace: TraceWriter | None) -> Iterator[None]:
    """Draw the steps that the runner computes meanwhile, if there is a trace to draw them in."""
    if trace is None:
        yield
        return
    recorder = runner.scheduler.recorder = StepRecorder.of(runner.engine)
    try:
        yield
    finally:
        for step in recorder.take():
            trace.on_step(step)


def bench_offline(
    model: str,
    config: EngineConfig,
    *,
    workloads: list[str],
    repeats: int,
    compare: bool,
    trace: TraceWriter | None = None,
) -> dict[str, Any]:
    """Run each workload `repeats` times after a warm-up; figures are of the median run.

    With `compare`, `transformers` runs the same jobs in turn with the engine, run by run, so
    that both meet the same machine.
    """
    if repeats < 1:
        raise ConfigError(f"--repeats = {repeats} must be at least 1")
    with LLM(model, **vars(config)) as llm, traced(llm, trace):
        engine = llm.engine
        other = None
        if compare:
            from .transformers_runner import TransformersRunner

            other = TransformersRunner(model, engine.config.dtype, engine.config.device)
        weights = weights_read_bytes(llm)
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
            run_jobs(llm, [Job(job.prompt[:32], 4) for job in jobs])
            runs, others = [], []
            for _ in range(repeats):
                runs.append(run_jobs(llm, jobs))
                if other is not None:
                    others.append(other.run(jobs))
            run = median_run(runs)
            reads = sum(read_share(engine.model_config, step.computed) for step in run.steps)
            row = _figures(name, jobs, run, reads * weights / bandwidth)
            if other is not None:
                row["transformers"] = _compared(jobs, row, others)
            rows.append(row)
        return {
            "model": model,
            **machine_figures(llm),
            "repeats": repeats,
            "weight_bytes_read": weights,
            "read_gb_per_s": round(bandwidth / 1e9, 1),
            "workloads": rows,
        }


def machine_figures(llm: Runner) -> dict[str, Any]:
    """What the engine runs in, where and on what."""
    config = llm.engine.config
    return {
        "dtype": str(config.dtype).removeprefix("torch."),
        "device": str(config.device),
        "threads": config.threads if config.device.type == "cpu" else torch.get_num_threads(),
        "machine": _machine(config.device, config.tp),
        "torch": torch.__version__,
    }


def _machine(device: torch.device, ranks: int) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if ranks == 1 else f"{ranks} of {name}"
    return platform.processor() or platform.machine()


class Step(NamedTuple):
    """What one step did."""

    computed: int
    """tokens, of prompts and of requests that decode"""
    sampled: int


class Run:
    """One run of some jobs; times in seconds since its start."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[float]] = [[] for _ in range(count)]
        self.steps: list[Step] = []
        self.computed_tokens = 0
        """of prompts"""
        self.cached_tokens: list[int] = []
        """of each prompt, those read from the prefix cache"""
        self.total_s = 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first one, of a single request."""
        [times] = self.tokens
        return (len(times) - 1) / (times[-1] - times[0])


def run_jobs(llm: Runner, jobs: list[Job], params: SamplingParams = GREEDY) -> Run:
    """All jobs at once, beginning with an empty prefix cache; each samples with its own seed.

    Raises `ConfigError` if one ends before its length.
    """
    scheduler, run = llm.scheduler, Run(len(jobs))
    scheduler.flush_cache()
    before = replace(scheduler.stats)
    params = params.resolve_defaults({})
    start = time.perf_counter()
    reqs = [
        Req(
            uid=uid,
            token_ids=list(job.prompt),
            prompt_len=len(job.prompt),
            params=params,
            seed=uid,
            max_len=len(job.prompt) + job.output_len,
        )
        for uid, job in enumerate(jobs)
    ]
    for req in reqs:
        scheduler.add(req)
    stats = scheduler.stats
    done = stats.num_prefill_tokens + stats.num_decode_tokens
    while scheduler.has_work:
        updates = scheduler.step()
        now = time.perf_counter() - start
        sampled = 0
        for update in updates:
            if update.token_id is not None:
                run.tokens[update.uid].append(now)
                sampled += 1
        computed = stats.num_prefill_tokens + stats.num_decode_tokens - done
        done += computed
        if computed:  # none is in the call that only reads the last overlapped step
            run.steps.append(Step(computed, sampled))
    run.total_s = time.perf_counter() - start
    run.cached_tokens = [req.num_cached_tokens for req in reqs]
    run.computed_tokens = stats.num_prefill_tokens - before.num_prefill_tokens
    for job, times in zip(jobs, run.tokens, strict=True):
        if len(times) != job.output_len:
            raise ConfigError(
                f"a request of {len(job.prompt)} + {job.output_len} tokens does not fit "
                f"--max-model-len {llm.max_model_len}"
            )
    return run


def median_run(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.total_s)[len(runs) // 2]


def _figures(name: str, jobs: list[Job], run: Run, limit_s: float) -> dict[str, Any]:
    """`limit_s` is what reading the weights would take, once for every step."""
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
        "steps": len(run.steps),
        "bandwidth_limit_share": round(limit_s / run.total_s, 3),
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


def weights_read_bytes(llm: Runner) -> int:
    """Bytes of weights that a decode step reads; of a mixture of experts, those of all experts.

    Of several ranks it is what one GPU reads, but on a CPU what they read of the memory that they
    share.
    """
    told = getattr(llm.engine, "weight_bytes", None)
    if told is not None:
        return int(told)
    config = llm.engine.config
    ranks = config.tp if config.device.type == "cpu" else 1
    looked_up = not llm.engine.model_config.tie_word_embeddings  # then only a row a token is read
    return ranks * sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in llm.engine.model.state_dict().items()
        if not (looked_up and name.startswith("model.embed_tokens."))
    )
