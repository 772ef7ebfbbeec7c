"""Results as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_table"]


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
