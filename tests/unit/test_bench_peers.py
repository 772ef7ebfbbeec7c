"""`benchmark/peers/peer.py`: every engine is given the same work and its figures mean the same."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.peers import peer

WORK = {
    "vocab_size": 100,
    "workloads": {
        "single": [{"prompt": [99, 1], "output_len": 5}],
        "prefill": [{"prompt": [1, 2, 3, 4], "output_len": 1}],
        "batch": [{"prompt": [1], "output_len": 3}, {"prompt": [2], "output_len": 7}],
        "prefix": [{"prompt": [5, 6], "output_len": 2}],
    },
}


class Engine:
    """Takes a second a token, prompt or output, by a clock of its own."""

    version, weights = "1.0", "none"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, missing: int = 0) -> None:
        self.now, self.missing, self.closed = 0.0, missing, False
        self.prompts: list[tuple[int, ...]] = []
        monkeypatch.setattr(peer.time, "perf_counter", lambda: self.now)

    def run(self, jobs: list[peer.Job]) -> list[int]:
        self.prompts += [tuple(job.prompt) for job in jobs]
        self.now += sum(len(job.prompt) + job.output_len for job in jobs)
        return [job.output_len - self.missing for job in jobs]

    def close(self) -> None:
        self.closed = True


def options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    """What the flags would give."""
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(WORK))
    parser = peer.arguments("a model")
    found = parser.parse_args(["--model", "m", "--workloads", str(path), "--starts", "0"])
    return argparse.Namespace(**{**vars(found), **changes})


def test_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(monkeypatch)
    peer.report("fake", options(tmp_path, repeats=2), lambda: engine)
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "engine": "fake",
        "version": "1.0",
        "model": "m",
        "weights": "none",
        "threads": 2,
        "repeats": 2,
        "decode_tok_s": 1.0,  # 4 tokens after the first in 4 s
        "prefill_tok_s": 0.8,  # 4 in 5 s
        "output_tok_s": 0.83,  # 10 in 12 s
        "prefix_s": 4.0,
        "first_token_s": None,
    }
    assert engine.closed
    # No run repeats a prompt of one before; ids wrap at the vocabulary.
    single = [p for p in engine.prompts if len(p) == 2 and (p[1] - p[0]) % 100 == 2]
    assert len(set(single)) == len(single) == 5
    assert all(0 <= token < 100 for prompt in engine.prompts for token in prompt)


def test_an_engine_that_stops_early_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"gave \[3\] tokens instead of \[4\]"):
        peer.report("fake", options(tmp_path), lambda: Engine(monkeypatch, missing=1))


def test_once_generates_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(monkeypatch)
    peer.report("fake", options(tmp_path, once=True), lambda: engine)
    assert capsys.readouterr().out == "first token\n"
    assert engine.prompts == [(99, 1)] and engine.now == 3 and engine.closed


def test_start_is_timed_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nprint('log')\nprint('first token' if '--once' in sys.argv else '')"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert peer._start_s() > 0
    script.write_text("print('log')")
    with pytest.raises(SystemExit, match="ended without a first token"):
        peer._start_s()
