"""`minisgl bench serve`: measure a server over HTTP."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minisgl.benchmark.serve_options import ServeOptions, parse_goodput
from minisgl.errors import RequestFailedError

from .flags import add_flags, from_flags

__all__ = ["add_serve", "run_serve"]


def add_serve(kinds: Any, common: argparse.ArgumentParser) -> None:
    """Add this benchmark to the parser of `bench`."""
    parser = kinds.add_parser(
        "serve",
        parents=[common],
        help="throughput and latency of a server, over HTTP",
        description="Send requests to an OpenAI-compatible server and print rates and latencies: "
        "to the first token (TTFT), per token after it (TPOT), between chunks (ITL), and of the "
        "whole request (E2E). Another run with the same --seed sends the same prompts, which the "
        "server may have cached.",
    )
    add_flags(parser, ServeOptions, "load")
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=(),
        metavar="NAME:MS",
        help="count the requests within all these limits, as in ttft:200 tpot:50 e2e:2000",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--plot", metavar="FILE", help="draw latencies into a .png, .svg or .pdf")
    parser.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> None:
    """Measure the server and print tables, or JSON; fails if all requests did."""
    options = from_flags(ServeOptions, arguments)
    goodput = parse_goodput(arguments.goodput)

    from minisgl.benchmark.plot import check_plot, save_plot
    from minisgl.benchmark.report import print_serve_table
    from minisgl.benchmark.serve import bench_serve, describe

    if arguments.plot is not None:
        check_plot(arguments.plot)
    results, departures = bench_serve(options, goodput=goodput)
    if arguments.plot is not None:
        save_plot(arguments.plot, departures, f"{results['model']} at {results['url']}")
    if arguments.json:
        print(json.dumps(results))
    else:
        print_serve_table(results)
    if not results["ok"]:
        raise RequestFailedError(f"all requests failed: {describe(results['errors'])}")
