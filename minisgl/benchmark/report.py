"""Results as a table for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "print_kernel_table",
    "print_scheduler_tables",
    "print_serve_table",
    "print_shape_table",
    "print_suite_table",
    "print_table",
]

_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def print_table(results: dict[str, Any]) -> None:
    """Print `bench_offline`'s results, one column a workload."""
    console = Console()
    for line in (
        f"{results['model']} in {results['dtype']} on {results['device']}, "
        f"{results['threads']} threads; median of {results['repeats']}",
        f"memory read {results['read_gb_per_s']} GB/s; "
        f"{results['weight_bytes_read'] / 1e6:.0f} MB of weights a step",
    ):
        console.print(line)
    rows = results["workloads"]
    table = _table("", *(row["workload"] for row in rows))
    figures: dict[str, Callable[[dict[str, Any]], object]] = {
        "prompt tokens": lambda row: f"{row['prompt_tokens']:,}",
        "computed, not cached": lambda row: f"{row['computed_prompt_tokens']:,}",
        "output tokens": lambda row: f"{row['output_tokens']:,}",
        "seconds": lambda row: row["total_s"],
        "prompt tok/s": lambda row: row["prompt_tok_s"],
        "output tok/s": lambda row: row["output_tok_s"],
        "decode tok/s": lambda row: row.get("decode_tok_s", "-"),
        "share of the limit": lambda row: f"{row['bandwidth_limit_share']:.0%}",
        "TTFT p50 ms": lambda row: row["ttft_ms"]["p50"],
        "TPOT p50 ms": lambda row: row.get("tpot_ms", {}).get("p50", "-"),
        "ITL p99 ms": lambda row: row.get("itl_ms", {}).get("p99", "-"),
    }
    if any("transformers" in row for row in rows):
        figures |= {
            "transformers output tok/s": lambda row: row["transformers"]["output_tok_s"],
            "times faster": lambda row: f"{row['transformers']['times_faster']}x",
        }
    for name, figure in figures.items():
        table.add_row(name, *(str(figure(row)) for row in rows))
    console.print(table)


def print_suite_table(results: dict[str, Any]) -> None:
    """Print `bench_cpu_suite`'s results, a row a workload beside its limit."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    kernels = "native kernels" if results["native"] else "torch kernels"
    if results["deterministic"]:
        kernels += " (deterministic: no other mode is faster)"
    console.print(
        f"{results['model']} in {results['dtype']}, quantization {results['quantization']}, KV in "
        f"{results['kv_dtype']}; {kernels}, {results['threads']} threads; "
        f"median of {results['repeats']}"
    )
    console.print(
        f"memory read {results['read_gb_per_s']} GB/s; GEMM {results['gemm_gflop_per_s']} GFLOP/s "
        f"in {results['dtype']}; {results['weight_bytes_read'] / 1e6:.0f} MB of weights a step"
    )
    rows = results["rows"]
    table = _table("", "workload", "", "figure", "limit", "share")
    for row in rows:
        cells = [row["row"], row["workload"], row["unit"]]
        cells += [f"{row['figure']:,}", f"{row['limit']:,}", f"{row['share']:.0%}"]
        table.add_row(*cells)
    console.print(table)
    console.print(f"start to first token {results['first_token_s']} s")


def print_shape_table(results: dict[str, Any]) -> None:
    """Print `bench_shape`'s results, a row a run beside the machine's limit."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{results['shape']}, random weights, {results['dtype']} on {results['device']} "
        f"({results['machine']}){', deterministic' if results['deterministic'] else ''}"
    )
    console.print(
        f"{results['requests']:,} requests, {results['prompt_tokens']:,} tokens in, "
        f"{results['output_tokens']:,} out"
    )
    console.print(_ceilings(results))
    parts = results["limit_s"]
    console.print(
        f"limit {results['limit_tok_s']:,} tok/s: {parts['weights']} s weights, "
        f"{parts['kv_reads']} s KV reads, {parts['prefill']} s prefill"
    )
    table = _table("", "output tok/s", "seconds", "steps", "share of the limit")
    other = results.get("not_deterministic", [])
    for name, runs in (("run", results["runs"]), ("not deterministic", other)):
        for number, run in enumerate(runs, 1):
            cells = [f"{run['output_tok_s']:,}", f"{run['total_s']:,}", f"{run['steps']:,}"]
            table.add_row(f"{name} {number}", *cells, f"{run['share']:.1%}")
    console.print(table)
    if other:
        price = f"{results['deterministic_price']:.1%}"
        console.print(f"price of --deterministic: {price} of the tokens/s, best run against best")


def print_kernel_table(results: dict[str, Any]) -> None:
    """Print `bench_kernels`' results, a row a kernel and size beside its ceiling."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"{results['shape']}, {results['dtype']} on {results['machine']}")
    console.print(_ceilings(results))
    table = _table("", "sizes", "us", "GB/s", "TFLOP/s", "share", "of")
    for row in results["rows"]:
        cells = ["failed"] + ["-"] * 4
        if "error" not in row:
            cells = [f"{row['us']:,.1f}", f"{row['gb_per_s']:,.0f}", f"{row['tflop_per_s']:,.1f}"]
            cells += [f"{row['share']:.0%}", row["ceiling"]]
        table.add_row(row["kernel"], row["sizes"], *cells)
    console.print(table)
    for row in results["rows"]:
        if "error" in row:
            console.print(f"{row['kernel']}, {row['sizes']}: {row['error']}")


def _ceilings(results: dict[str, Any]) -> str:
    """What the machine does at most, in words."""
    return (
        f"copy {results['copy_gb_per_s']:,} GB/s, read and write counted; "
        f"GEMM {results['gemm_tflop_per_s']:,} TFLOP/s"
    )


def print_scheduler_tables(results: dict[str, Any]) -> None:
    """Print `bench_scheduler`'s results: a row a number of requests and loop, then of sequences."""
    console = Console()
    console.print("The host's work without a model; microseconds of CPU time")
    console.print(
        f"Python {results['python']} on {results['machine']}; garbage collector "
        f"{'on' if results['gc_enabled'] else 'off'}; pages of {results['page_size']} tokens; "
        f"{results['steps']} steps"
    )
    steps = _table("requests", "loop", "p50", "p99", "p50 a request", title="One decode step")
    for row in results["decode"]:
        steps.add_row(
            f"{row['running']:,}",
            row["loop"],
            f"{row['step_us']['p50']:.1f}",
            f"{row['step_us']['p99']:.1f}",
            f"{row['us_per_request']:.2f}",
        )
    console.print(steps)
    for row in results["decode"]:
        if "share_of_target" in row:
            share = f"{row['share_of_target']:.0%} of the 1 ms aimed at"
            console.print(f"{row['running']} requests, {row['loop']} loop: {share}")
    calls = ("match_first_us", "match_again_us", "begin_end_us", "evict_page_us")
    names = ("match, new", "match, again", "lock, unlock", "evict a page")
    title = "Prefix cache, p50, a prompt of 1,000 tokens"
    prefixes = _table("sequences", "pages", "tokens hit", *names, title=title)
    for row in results["prefix"]:
        prefixes.add_row(
            f"{row['cached']:,}",
            f"{row['cached_pages']:,}",
            f"{row['matched_tokens']:,}",
            *[f"{row[call]['p50']:.1f}" for call in calls],
        )
    console.print(prefixes)


def print_serve_table(results: dict[str, Any]) -> None:
    """Print `bench_serve`'s results: what was asked, a row a figure, a row a latency, notes."""
    # What servers and users write is shown as it is: it is no markup.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{results['model']} at {results['url']}, {results['endpoint']}; {_load(results)}"
    )
    figures = {
        "requests ok": f"{results['ok']:,} of {results['requests']:,}",
        "seconds": f"{results['duration_s']:,}",
        "requests/s": f"{results['requests_per_s']:,}",
        "most in flight": f"{results['peak_concurrency']:,}",
        "input tokens": f"{results['input_tokens']:,} ({results['cached_tokens']:,} cached)",
        "output tokens": f"{results['output_tokens']:,}",
        "input tok/s": f"{results['input_tok_s']:,}",
        "output tok/s": f"{results['output_tok_s']:,}",
        "total tok/s": f"{results['total_tok_s']:,}",
        "tokens a chunk": f"{results['tokens_per_chunk']:,}",
    }
    if "goodput" in results:
        goodput = results["goodput"]
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        within = f"{goodput['requests_per_s']:,} requests/s, {goodput['share']:.1%}"
        figures[f"within {limits}"] = within
    figures["client's share of a core"] = f"{results['client']['cpu_share']:.0%}"
    table = _table("", "")
    table.show_header = False
    for name, figure in figures.items():
        table.add_row(name, figure)
    console.print(table)
    rows = {key[:-3].upper(): results[key] for key in _LATENCIES if key in results}
    if "lag_ms" in results["client"]:
        rows["sent late by"] = results["client"]["lag_ms"]
    latencies = _table("", "mean", "p50", "p90", "p99", title="Milliseconds")
    for name, row in rows.items():
        latencies.add_row(name, *(f"{row[key]:,}" for key in ("mean", "p50", "p90", "p99")))
    console.print(latencies)
    for error in results["errors"]:
        console.print(f"failed: {error['count']} x {error['kind']}: {error['message']}")
    for note in results["notes"]:
        console.print(f"note: {note}")


def _load(results: dict[str, Any]) -> str:
    """How the requests were sent, in words."""
    rate, concurrency = results["request_rate"], results["concurrency"]
    sent = "sent at once" if rate == "inf" else f"sent at {rate:g} a second"
    return sent if concurrency is None else f"{sent}, at most {concurrency} in flight"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "loop") else "right")
    return table
