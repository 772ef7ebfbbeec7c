"""Results as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_scheduler_tables", "print_table"]


def print_table(results: dict[str, Any]) -> None:
    """Print `bench_offline`'s results, one row a workload."""
    console = Console()
    console.print(
        f"{results['model']} in {results['dtype']} on {results['device']}, "
        f"{results['threads']} threads; memory read {results['read_gb_per_s']} GB/s; "
        f"{results['weight_bytes_read'] / 1e6:.0f} MB of weights a step; "
        f"median of {results['repeats']}",
        soft_wrap=True,
    )
    table = Table()
    columns = [
        "workload",
        "in",
        "computed",
        "out",
        "seconds",
        "in tok/s",
        "out tok/s",
        "decode tok/s",
        "limit share",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "ITL p99 ms",
    ]
    compared = any("transformers" in row for row in results["workloads"])
    if compared:
        columns += ["transformers out tok/s", "times faster"]
    for column in columns:
        table.add_column(column, justify="left" if column == "workload" else "right")
    for row in results["workloads"]:
        cells = [
            row["workload"],
            row["prompt_tokens"],
            row["computed_prompt_tokens"],
            row["output_tokens"],
            row["total_s"],
            row["prompt_tok_s"],
            row["output_tok_s"],
            row.get("decode_tok_s", "-"),
            f"{row['bandwidth_limit_share']:.0%}",
            row["ttft_ms"]["p50"],
            row.get("tpot_ms", {}).get("p50", "-"),
            row.get("itl_ms", {}).get("p99", "-"),
        ]
        if compared:
            other = row["transformers"]
            cells += [other["output_tok_s"], f"{other['times_faster']}x"]
        table.add_row(*map(str, cells))
    console.print(table)


def print_scheduler_tables(results: dict[str, Any]) -> None:
    """Print `bench_scheduler`'s results: a row a number of requests and loop, then of sequences."""
    console = Console()
    console.print(
        f"The host's work, without a model: Python {results['python']} on {results['machine']}, "
        f"pages of {results['page_size']} tokens, {results['steps']} steps, garbage collector "
        f"{'on' if results['gc_enabled'] else 'off'}; microseconds of CPU time",
        soft_wrap=True,
    )
    steps = _table("decoding", "loop", "step p50", "step p99", "p50 per request", "share of 1.0 ms")
    for row in results["decode"]:
        share = row.get("share_of_target")
        steps.add_row(
            str(row["running"]),
            row["loop"],
            f"{row['step_us']['p50']:.1f}",
            f"{row['step_us']['p99']:.1f}",
            f"{row['us_per_request']:.2f}",
            "-" if share is None else f"{share:.0%}",
        )
    console.print(steps)
    calls = ("match_first_us", "match_again_us", "begin_end_us", "evict_page_us")
    names = ("match first", "match again", "begin, end", "evict a page")
    prefixes = _table("cached", "pages", "tokens hit", *[f"{name} p50" for name in names])
    for row in results["prefix"]:
        prefixes.add_row(
            f"{row['cached']:,}",
            f"{row['cached_pages']:,}",
            str(row["matched_tokens"]),
            *[f"{row[call]['p50']:.1f}" for call in calls],
        )
    console.print(prefixes)


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == "loop" else "right")
    return table
