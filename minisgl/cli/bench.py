"""`minisgl bench`: measure speed on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minisgl.config import EngineConfig

from .flags import add_flags, from_flags

__all__ = ["add_parser"]


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `bench` and its one benchmark so far."""
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    kinds = bench.add_subparsers(metavar="BENCHMARK", required=True, dest="benchmark")
    parser = kinds.add_parser(
        "offline",
        parents=[common],
        help="throughput and latency of the engine in this process",
        description="Run workloads of random token ids, greedy, EOS ignored; print tokens/s, "
        "latencies and the share of the memory-bandwidth limit.",
    )
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument(
        "--workload",
        action="append",
        choices=("single", "prefill", "batch", "prefix"),
        help="single: 64 in, 128 out; prefill: one prompt of 1,024; batch: 32 requests of 32 to "
        "256 in and out; prefix: 32 requests sharing 512 tokens; default: single and batch",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; medians are shown")
    parser.add_argument(
        "--compare",
        choices=("transformers",),
        help="run the same prompts on this library too, in turn",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the workloads and print a table, or JSON."""
    config = from_flags(EngineConfig, arguments)

    from minisgl.benchmark.offline import bench_offline
    from minisgl.benchmark.report import print_table

    results = bench_offline(
        arguments.model,
        config,
        workloads=arguments.workload or ["single", "batch"],
        repeats=arguments.repeats,
        compare=arguments.compare is not None,
    )
    if arguments.json:
        print(json.dumps(results))
    else:
        print_table(results)
