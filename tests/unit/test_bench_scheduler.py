"""`minisgl bench scheduler`: the figures' structure, and that what it measured really happened."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from minisgl.benchmark import prefix, report, scheduler
from minisgl.cli import bench, main
from minisgl.kvcache.base import Match

PERCENTILES = {"mean", "p50", "p90", "p99"}
SMALL = ["--running", "1", "4", "--steps", "40", "--cached", "1", "10"]


def measured(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """The last line of a small run's output, which must be one JSON object."""
    assert main(["bench", "scheduler", *SMALL, *flags, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_json_has_every_loop_and_size(page_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--page-size", str(page_size))
    assert found["benchmark"] == "scheduler"
    assert (found["page_size"], found["steps"], found["gc_enabled"]) == (page_size, 40, True)
    decode = found["decode"]
    assert [(row["running"], row["loop"]) for row in decode] == [
        (1, "plain"),
        (1, "overlap"),
        (4, "plain"),
        (4, "overlap"),
    ]
    for row in decode:
        assert set(row["step_us"]) == PERCENTILES
        assert row["us_per_request"] == round(row["step_us"]["p50"] / row["running"], 3)
        # Those of the warm-up, of the measured steps and the last one.
        assert row["output_tokens"] == row["running"] * (scheduler.WARM_UP_STEPS + 40 + 1)
    hit = 999 // page_size * page_size
    shared, full = 200 // page_size, 1000 // page_size
    assert [row["cached"] for row in found["prefix"]] == [1, 10]
    for row in found["prefix"]:
        assert (row["tokens"], row["matched_tokens"]) == (1000, hit)
        assert row["cached_pages"] == shared + row["cached"] * (full - shared)
        assert row["evicted_pages"] == min(prefix.PROBES, row["cached_pages"] // 2)
        for call in ("match_first_us", "match_again_us", "begin_end_us", "evict_page_us"):
            assert set(row[call]) == PERCENTILES


def test_only_the_target_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TARGET_RUNNING", 4)
    found = scheduler.bench_scheduler(running=[1, 4], cached=[1], steps=32, page_size=16)
    for row in found["decode"]:
        assert ("share_of_target" in row) == (row["running"] == 4)
        if row["running"] == 4:
            assert row["share_of_target"] == round(row["step_us"]["p50"] / 1000, 3)


def test_groups_share_their_first_tokens_only() -> None:
    found = prefix.bench_prefix(25, 16)  # three groups
    assert found["cached_pages"] == 3 * 12 + 25 * 50
    assert found["matched_tokens"] == 992


def test_a_prefix_that_is_not_found_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.kvcache.RadixCache.match", lambda self, req: Match(976))
    with pytest.raises(RuntimeError, match=r"of 992 cached tokens, \[976, 976\] 992 hit"):
        prefix.bench_prefix(1, 16)


def test_a_request_that_does_not_decode_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_requests", fewer(scheduler._requests))
    with pytest.raises(RuntimeError, match="3 of 4 requests decoded in a step"):
        scheduler.bench_scheduler(running=[4], cached=[], steps=32, page_size=16)


def fewer(requests: Any) -> Any:
    """The same requests, the last of which ends in the middle of the measurement."""

    def changed(running: int, page_size: int, output_len: int) -> list[Any]:
        reqs: list[Any] = requests(running, page_size, output_len)
        reqs[-1].max_len -= 10
        return reqs

    return changed


def test_the_clock_counts_each_call_and_returns_its_result() -> None:
    timer = scheduler.Timer()
    assert timer.times_us == []
    assert timer.run(divmod, 7, 2) == (3, 1)
    assert timer.run(sum, [1, 2, 3]) == 6
    assert len(timer.times_us) == 2


def test_table_shows_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "garbage collector on; pages of 16 tokens; 40 steps" in shown
    for running in (1, 4):
        for loop in ("plain", "overlap"):
            assert re.search(rf"│ +{running} │ {loop} +│", shown), shown
    for cached, pages in ((1, 62), (10, 512)):
        assert re.search(rf"│ +{cached} │ +{pages} │ +992 │", shown), shown


def test_the_largest_page_is_the_shared_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.MAX_PAGE_SIZE == prefix.SHARED_LEN
    found = measured(capsys, "--page-size", "200", "--steps", "400")
    assert [row["matched_tokens"] for row in found["prefix"]] == [800, 800]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--running", "0"], ["--running = 0", "from 1 to 65536"]),
        (["--running", "4", "-1"], ["--running = -1"]),
        (["--running", "many"], ["--running", "'many'"]),
        (["--running"], ["--running"]),
        (["--cached", "0"], ["--cached = 0", "from 1 to"]),
        (["--cached", "1.5"], ["--cached", "'1.5'"]),
        (["--page-size", "0"], ["--page-size = 0", "from 1 to 200"]),
        (["--page-size", "201"], ["--page-size = 201", "from 1 to 200"]),
        (["--steps", "31"], ["--steps = 31", "at least 32", "--page-size 16"]),
        (["--steps", "40", "--page-size", "21"], ["--steps = 40", "at least 42"]),
        (["--steps", "999999999999"], ["--steps = 999999999999"]),
        (["--steps", "x"], ["--steps", "'x'"]),
        (["--model", "smollm2"], ["--model"]),
        (["extra"], ["extra"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(
    flags: list[str],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # They are found before anything is loaded: this import would be an ImportError.
    monkeypatch.setitem(sys.modules, "minisgl.benchmark.scheduler", None)
    try:
        code: Any = main(["bench", "scheduler", *flags])
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert re.match("minisgl bench scheduler: error: ", line), line
    for words in named:
        assert words in line


def test_the_offline_table_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row: dict[str, Any] = {
        "prompt_tokens": 17408, "computed_prompt_tokens": 1536, "output_tokens": 1024,
        "total_s": 123.456, "prompt_tok_s": 12345.6, "output_tok_s": 12345.6,
        "decode_tok_s": 12345.6, "bandwidth_limit_share": 0.123, "ttft_ms": {"p50": 12345.67},
        "tpot_ms": {"p50": 12345.67}, "itl_ms": {"p99": 12345.67},
        "transformers": {"output_tok_s": 12345.6, "times_faster": 12.34},
    }  # fmt: skip
    rows = [row | {"workload": name} for name in ("single", "prefill", "batch", "prefix")]
    machine = {
        "model": "smollm2", "dtype": "bfloat16", "device": "cpu", "threads": 2, "repeats": 3,
        "read_gb_per_s": 21.5, "weight_bytes_read": 269_000_000, "workloads": rows,
    }  # fmt: skip
    report.print_table(machine)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("prefill", "17,408", "1,536", "12345.67", "12.34x", "12%", "269 MB"):
        assert words in shown
