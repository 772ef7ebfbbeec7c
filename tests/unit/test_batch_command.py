"""`minisgl batch` from its files to its exit code, over an engine that plays scripts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.server.batch import BatchJob, run_batch
from minisgl.server.config import ServerConfig
from tests.unit.batch_lines import file_of, line, outcomes
from tests.unit.fake_async_engine import FakeAsyncEngine, answer


class LivingEngine(FakeAsyncEngine):
    """One whose life is that of an `async with` block."""

    was_closed = False

    async def __aenter__(self) -> LivingEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.was_closed = True


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    """Of the lines a and b."""
    (tmp_path / "in.jsonl").write_bytes(file_of([line("a"), line("b", {"prompt": "second"})]))
    return BatchJob(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), concurrency=1)


def exit_code(job: BatchJob, engine: LivingEngine, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("minisgl.server.batch.command.AsyncEngine", lambda model, **options: engine)
    return run_batch("fake", EngineConfig(), ServerConfig(), job)


def test_a_batch_succeeds_if_all_its_lines_did_now_or_before(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LivingEngine(lambda ids, choice: answer("no", "error" if len(ids) > 3 else "length"))
    assert exit_code(job, engine, monkeypatch) == 1
    assert engine.was_closed
    assert outcomes(Path(job.output)) == {"a": 200, "b": 500}
    counts, said = capsys.readouterr().err.splitlines()
    assert counts.startswith("[1 done, 1 failed | ")
    assert said.startswith("minisgl batch: failed lines say why in ")
    assert exit_code(job, LivingEngine(), monkeypatch) == 0
    assert outcomes(Path(job.output)) == {"a": 200, "b": 200}
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_batch_and_the_same_command_goes_on(
    job: BatchJob,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def script(ids: list[int], choice: int) -> list[Any]:
        if len(ids) > 3:  # the second line
            engine.manual = True  # and goes on for ever
            os.kill(os.getpid(), number)
        return answer("Hi")

    engine = LivingEngine(script)
    assert exit_code(job, engine, monkeypatch) == 128 + number
    assert engine.was_closed
    assert len(engine.aborted) == 1
    assert outcomes(Path(job.output)) == {"a": 200}
    counts, said = capsys.readouterr().err.splitlines()
    assert counts.startswith("[1 done, 0 failed | ")
    assert said == "minisgl batch: interrupted; the same command goes on from here"
    assert exit_code(job, LivingEngine(), monkeypatch) == 0
    assert outcomes(Path(job.output)) == {"a": 200, "b": 200}


def test_an_engine_that_dies_ends_the_command(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(ids: list[int], choice: int) -> list[Any]:
        if len(ids) > 3:
            asyncio.get_running_loop().call_soon(engine.die, "its process was killed")
        return answer("Hi")

    engine = LivingEngine(script)
    assert exit_code(job, engine, monkeypatch) == 1
    assert engine.was_closed
    assert outcomes(Path(job.output)) == {"a": 200}
    *_, said = capsys.readouterr().err.splitlines()
    assert said == (
        "minisgl batch: error: its process was killed; the same command goes on from here"
    )


def test_files_that_a_batch_cannot_have_are_refused(job: BatchJob, tmp_path: Path) -> None:
    def start(source: str, output: str) -> None:
        run_batch("fake", EngineConfig(), ServerConfig(), BatchJob(source, output))

    with pytest.raises(ConfigError, match=r"--input .*none: No such file or directory"):
        start(str(tmp_path / "none"), job.output)
    with pytest.raises(ConfigError, match="--input .*: Is a directory"):
        start(str(tmp_path), job.output)
    with pytest.raises(ConfigError, match=r"--output .*in\.jsonl is the input"):
        start(job.input, f"{tmp_path}/./in.jsonl")
    with pytest.raises(ConfigError, match="--output .* is no regular file"):
        start(job.input, str(tmp_path))
    assert not Path(job.output).exists()
