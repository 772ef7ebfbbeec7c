"""`minisgl bench`: measure speed on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from minisgl.benchmark.shapes import SHAPES
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError

from .bench_serve import add_serve
from .flags import add_flags, from_flags

if TYPE_CHECKING:
    from minisgl.server.trace import TraceWriter

__all__ = ["add_parser"]

MAX_PAGE_SIZE = 200
"""The shared tokens of `minisgl.benchmark.prefix`, named here so as not to import torch for it."""
MAX_RUNNING, MAX_CACHED, MAX_STEPS = 65_536, 100_000, 100_000
"""Beyond these the benchmark takes hours or the memory of a large machine."""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `bench` and its benchmarks."""
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = bench.add_subparsers(metavar="BENCHMARK", required=True, dest="benchmark")
    _add_offline(kinds, common)
    _add_kernel(kinds, common)
    _add_scheduler(kinds, common)
    add_serve(kinds, common)


def _add_offline(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser(
        "offline",
        parents=[common],
        help="throughput and latency of the engine in this process",
        description="Run workloads of random token ids, greedy, EOS ignored; print tokens/s, "
        "latencies and the share of the memory-bandwidth limit.",
    )
    parser.add_argument("--model", help="folder, .gguf file, hub id, or smollm2 (default: smollm2)")
    parser.add_argument(
        "--workload",
        action="append",
        choices=("single", "prefill", "batch", "prefix"),
        help="single: 64 in, 128 out; prefill: one prompt of 1,024; batch: 32 requests of 32 to "
        "256 in and out; prefix: 32 requests sharing 512 tokens; default: single and batch",
    )
    parser.add_argument(
        "--suite",
        choices=("cpu",),
        help="all four workloads, each beside the machine's limit for it, the price of "
        "--deterministic, and the time from start to first token",
    )
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        help="instead of a model, random weights of this shape: 256 requests of 100 to 1024 "
        "tokens in and out at temperature 0.6, each run beside the machine's limit, and the price "
        "of --deterministic; sets --max-model-len 4096, --max-prefill-length 16384 and "
        "--max-running-requests 256 unless they are given",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="INT",
        help="with --shape, only its first requests (default: all 256)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="INT",
        help="runs of each; medians are shown, with --shape all (default: 3, with --shape 2)",
    )
    parser.add_argument(
        "--compare",
        choices=("transformers",),
        help="run the same prompts on this library too, in turn",
    )
    parser.add_argument(
        "--trace-file",
        metavar="FILE",
        help="write a Chrome trace of all steps, on host and device (open it in Perfetto)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run_offline)


def _add_kernel(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser(
        "kernel",
        parents=[common],
        help="each GPU kernel beside the machine's ceilings",
        description="Time the CUDA kernels of a model's shape on random inputs, beside what the "
        "machine copies and multiplies at most.",
    )
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), default="qwen3-0.6b", help="whose sizes are measured"
    )
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this one; can be repeated (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.set_defaults(run=run_kernel)


def _add_scheduler(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser(
        "scheduler",
        parents=[common],
        help="the host's work for a step and for a cached prefix, without a model",
        description="Measure the host's work in microseconds, without a model: a decode step of "
        "the scheduler, plain and overlapped, and the prefix cache's calls for 1,000 tokens.",
    )
    integers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "INT"}
    parser.add_argument(
        "--running",
        **integers,
        default=[1, 16, 64, 256, 1024],
        help="requests that decode (default: 1 16 64 256 1024)",
    )
    parser.add_argument(
        "--cached",
        **integers,
        default=[1, 100, 10_000],
        help="sequences in the prefix cache (default: 1 100 10000)",
    )
    parser.add_argument(
        "--steps", type=int, default=512, metavar="INT", help="decode steps of each measurement"
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="INT", help="tokens in a page")
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.set_defaults(run=run_scheduler)


def run_offline(arguments: argparse.Namespace) -> None:
    """Run the workloads and print a table, or JSON."""
    config = from_flags(EngineConfig, arguments)
    if arguments.shape is not None:
        _run_shape(arguments, config)
        return
    if arguments.requests is not None:
        raise ConfigError("--requests is for --shape: the other workloads have their own number")
    others = (arguments.workload, arguments.compare, arguments.trace_file)
    if arguments.suite is not None and any(others):
        raise ConfigError(
            "--suite has workloads of its own: it takes no --workload, --compare or --trace-file"
        )

    from minisgl.benchmark import report
    from minisgl.benchmark.offline import bench_offline
    from minisgl.benchmark.suite import bench_cpu_suite

    model = arguments.model or "smollm2"
    repeats = 3 if arguments.repeats is None else arguments.repeats
    if arguments.suite is not None:
        results = bench_cpu_suite(model, config, repeats=repeats)
        show = report.print_suite_table
    else:
        with _open_trace(arguments) as trace:
            results = bench_offline(
                model,
                config,
                workloads=arguments.workload or ["single", "batch"],
                repeats=repeats,
                compare=arguments.compare is not None,
                trace=trace,
            )
        show = report.print_table
    _show(arguments, results, show)


def _run_shape(arguments: argparse.Namespace, config: EngineConfig) -> None:
    for name in ("model", "workload", "suite", "compare"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--shape has weights and a workload of its own: it takes no --{name}"
            )

    from minisgl.benchmark.reference import bench_shape
    from minisgl.benchmark.report import print_shape_table
    from minisgl.benchmark.workloads import MAX_REFERENCE_REQUESTS

    requests, repeats = arguments.requests, arguments.repeats
    with _open_trace(arguments) as trace:
        results = bench_shape(
            arguments.shape,
            config,
            num_requests=MAX_REFERENCE_REQUESTS if requests is None else requests,
            repeats=2 if repeats is None else repeats,
            trace=trace,
        )
    _show(arguments, results, print_shape_table)


def _open_trace(arguments: argparse.Namespace) -> AbstractContextManager[TraceWriter | None]:
    """The trace that was asked for; one that can't be written is known before a model is loaded."""
    if arguments.trace_file is None:
        return nullcontext()
    from minisgl.server.trace import TraceWriter

    return closing(TraceWriter(arguments.trace_file))


def run_kernel(arguments: argparse.Namespace) -> int:
    """Time the kernels and print a table, or JSON; 1 if one of them failed."""
    from minisgl.benchmark.kernels import bench_kernels
    from minisgl.benchmark.report import print_kernel_table

    results = bench_kernels(arguments.shape, arguments.kernel or ())
    _show(arguments, results, print_kernel_table)
    return int(any("error" in row for row in results["rows"]))


def run_scheduler(arguments: argparse.Namespace) -> None:
    """Measure the scheduler and the prefix cache and print tables, or JSON."""
    bounds = (
        ("--running", arguments.running, MAX_RUNNING),
        ("--cached", arguments.cached, MAX_CACHED),
        ("--steps", [arguments.steps], MAX_STEPS),
        ("--page-size", [arguments.page_size], MAX_PAGE_SIZE),
    )
    for flag, values, most in bounds:
        for value in values:
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} = {value} must be from 1 to {most}")
    if arguments.steps < 2 * arguments.page_size:
        raise ConfigError(
            f"--steps = {arguments.steps} must be at least {2 * arguments.page_size}, twice "
            f"--page-size {arguments.page_size}, so that every request gets new pages"
        )

    from minisgl.benchmark.report import print_scheduler_tables
    from minisgl.benchmark.scheduler import bench_scheduler

    results = bench_scheduler(
        running=arguments.running,
        cached=arguments.cached,
        steps=arguments.steps,
        page_size=arguments.page_size,
    )
    _show(arguments, results, print_scheduler_tables)


def _show(
    arguments: argparse.Namespace,
    results: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """One JSON object as last line, if asked for, else the table for people."""
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results)
