"""What the peers' scripts share: the workloads, the clock and the JSON line. No dependencies.

Every script runs the same four workloads through a `run` function that takes jobs (a prompt's ids
and how many tokens to generate), runs them all at once, and returns how many tokens each gave.
Each run adds its number to all ids, so that no prefix cache knows a prompt from the run before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Job", "arguments", "report"]

_READY = "first token"


class Job(NamedTuple):
    """One request."""

    prompt: list[int]
    output_len: int


Run = Callable[[list[Job]], list[int]]


def arguments(model: str) -> argparse.ArgumentParser:
    """The flags that all scripts have; `model` says what --model is to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--workloads", default="workloads.json", help="file of workloads.py")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument(
        "--starts", type=int, default=3, help="processes timed to their first token, after one"
    )
    parser.add_argument("--once", action="store_true", help="generate one token, say so and end")
    return parser


def report(engine: str, options: argparse.Namespace, load: Callable[[], Any]) -> None:
    """Measure the engine that `load` returns (it has `version`, `weights`, `run`, `close`).

    The figures: `decode_tok_s` of one request after its first token, `prefill_tok_s` of a prompt
    of 1,024 tokens, `output_tok_s` of 32 requests at once, `prefix_s` for 32 that share 512
    tokens, and `first_token_s` from the start of a fresh process, after one that warms the file
    cache (null without --starts).
    """
    found = json.loads(Path(options.workloads).read_text("utf-8"))
    loads = {name: [Job(**job) for job in jobs] for name, jobs in found["workloads"].items()}
    if options.once:
        loaded = load()
        loaded.run([Job(loads["single"][0].prompt, 1)])
        print(_READY, flush=True)
        loaded.close()
        return
    starts = [_start_s() for _ in range(options.starts + 1)][1:] if options.starts else []
    loaded = load()
    clock = _Clock(loaded.run, found["vocab_size"])
    [single] = loads["single"]
    measured = {"first": [Job(single.prompt, 1)], **loads}
    rows: dict[str, list[float]] = {name: [] for name in measured}
    for jobs in loads.values():
        clock.seconds([Job(job.prompt[:32], 4) for job in jobs])
    for _ in range(options.repeats):
        for name, jobs in measured.items():
            rows[name].append(clock.seconds(jobs))
            print(f"{name}: {rows[name][-1]:.2f} s", file=sys.stderr)
    loaded.close()
    seconds = {name: statistics.median(values) for name, values in rows.items()}
    [prefill], batch = loads["prefill"], loads["batch"]
    result = {
        "engine": engine,
        "version": loaded.version,
        "model": options.model,
        "weights": loaded.weights,
        "threads": options.threads,
        "repeats": options.repeats,
        "decode_tok_s": (single.output_len - 1) / (seconds["single"] - seconds["first"]),
        "prefill_tok_s": len(prefill.prompt) / seconds["prefill"],
        "output_tok_s": sum(job.output_len for job in batch) / seconds["batch"],
        "prefix_s": seconds["prefix"],
        "first_token_s": statistics.median(starts) if starts else None,
    }
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in result.items()}))


class _Clock:
    """Times runs, each of prompts that none before it had, and checks what they gave."""

    def __init__(self, run: Run, vocab_size: int) -> None:
        self._run, self._vocab_size, self._count = run, vocab_size, 0

    def seconds(self, jobs: list[Job]) -> float:
        """Seconds until all jobs have ended."""
        self._count, shift = self._count + 1, self._count
        fresh = [Job([(i + shift) % self._vocab_size for i in job.prompt], job[1]) for job in jobs]
        start = time.perf_counter()
        counts = self._run(fresh)
        seconds = time.perf_counter() - start
        if counts != (wanted := [job.output_len for job in jobs]):
            sys.exit(f"the engine gave {counts} tokens instead of {wanted}")
        return seconds


def _start_s() -> float:
    """Seconds from the start of this script in a process of its own to its first token."""
    start = time.perf_counter()
    command = [sys.executable, *sys.argv, "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == _READY:
                seconds = time.perf_counter() - start
                process.communicate()
                return seconds
    sys.exit(f"{' '.join(command)} ended without a first token")
