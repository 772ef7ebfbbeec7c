"""A rank that dies, hangs or never starts: an error that names it, soon, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minisgl import LLM, SamplingParams
from minisgl.engine import engine
from minisgl.errors import MinisglError
from minisgl.scheduler import ranks
from tests.helpers import TINY, random_prompts, save, tiny_hf_model
from tests.nodes import SOON_S, failing

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "reference",
    "threads": 1,
    "num_pages": 64,
}
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
[PROMPT] = random_prompts([9], TINY["vocab_size"])
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tiny_hf_model("llama"), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What one process answers."""
    with LLM(model, **OPTIONS) as llm:
        return answer(llm)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """A test leaves no process behind, not even stopped."""
    yield
    assert followers() == []


def followers() -> list[int]:
    """The other ranks' processes, in the order of their start."""
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if "minisgl.scheduler.follower" in child.cmdline()]
    return [child.pid for child in sorted(found, key=lambda child: child.create_time())]


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SHORT, use_tqdm=False)[0].token_ids


def test_a_killed_rank_ends_the_engine_and_the_next_one_works(
    model: Path, expected: list[int]
) -> None:
    with LLM(model, tp=4, **OPTIONS) as llm:
        stream = llm.stream(PROMPT, ENDLESS)
        next(stream)
        pid = followers()[1]
        os.kill(pid, signal.SIGKILL)
        why = f"rank 2 (pid {pid}) was killed by SIGKILL"
        assert why in failing(lambda: list(stream))
        assert why in failing(lambda: answer(llm)), "it stays so"
        assert why in failing(llm.reset_prefix_cache)
    assert followers() == []
    for _ in range(2):
        with LLM(model, tp=2, **OPTIONS) as llm:
            assert answer(llm) == expected


def test_a_rank_that_dies_while_nothing_runs(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model, tp=2, **OPTIONS) as llm:
        [pid] = followers()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + SOON_S
        while "was killed by SIGKILL" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert f"rank 1 (pid {pid})" in failing(lambda: answer(llm))


def test_a_hung_rank_is_not_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 1.5)
    monkeypatch.setattr(ranks, "FAREWELL_S", 0.5)
    with LLM(model, tp=2, **OPTIONS) as llm:
        answer(llm)
        time.sleep(2)  # a rank without work waits for longer than that
        answer(llm)
        os.kill(followers()[0], signal.SIGSTOP)
        assert "Timed out" in failing(lambda: answer(llm))
        assert "Timed out" in failing(lambda: answer(llm))


def test_a_hung_rank_does_not_keep_the_engine_from_closing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "FAREWELL_S", 0.5)
    with LLM(model, tp=2, **OPTIONS):
        os.kill(followers()[0], signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < SOON_S


def test_a_rank_that_loads_for_longer_than_a_collective_may_take(
    model: Path,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 is the slow one, then another, which rank 0 says that it waits for."""
    load = engine._load_model

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.2)
        return load(*arguments)

    monkeypatch.setattr(ranks, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(engine, "_load_model", slowly)
    options = {**OPTIONS, "num_pages": None, "memory_ratio": 0.01}  # ranks agree on the pages
    with LLM(model, tp=2, **options) as llm:
        assert answer(llm) == expected
    monkeypatch.setattr(ranks, "LOG_S", 0.5)

    def stopping(*arguments: Any) -> Any:
        pid = followers()[0]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
        return load(*arguments)

    monkeypatch.setattr(engine, "_load_model", stopping)
    with LLM(model, tp=2, **options) as llm:
        assert answer(llm) == expected
    assert 'rank 0 has waited 1 s for "loaded" from rank 1' in caplog.text


def test_closing_is_quiet(
    model: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "minisgl")
    with LLM(model, tp=2, **OPTIONS) as llm:
        stream = llm.stream(PROMPT, ENDLESS)
        next(stream)
    assert "rank" not in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_end_with_the_program_that_is_killed(model: Path) -> None:
    code = f"from minisgl import LLM; llm = LLM({str(model)!r}, tp=2, **{OPTIONS!r}); print(1); "
    command = [sys.executable, "-c", code + "llm.generate([[5]] * 8, use_tqdm=False); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as program:
        assert program.stdout is not None and program.stdout.readline() == b"1\n"
        [child] = psutil.Process(program.pid).children()
        program.kill()
        child.wait(SOON_S)


@pytest.mark.parametrize("missing", ["everything", "weights"])
def test_a_rank_that_does_not_start(
    model: Path, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds another folder than rank 0: before it joins the others, or after."""
    if missing == "weights":
        shutil.copy(model / "config.json", tmp_path)

    made = ranks.RankSpec

    def misled(rank: int, host: str, port: int, path: str, *rest: Any) -> ranks.RankSpec:
        return made(rank, host, port, str(tmp_path) if rank == 2 else path, *rest)

    monkeypatch.setattr(ranks, "RankSpec", misled)
    message = failing(lambda: LLM(model, tp=4, **OPTIONS))
    assert "rank 2" in message and str(tmp_path) in message


def test_what_fails_alike_on_all_ranks_has_its_own_message(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(model / "config.json", tmp_path)
    messages = []
    for size in (1, 2):
        with pytest.raises(MinisglError) as caught:
            LLM(tmp_path, tp=size, **OPTIONS)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    assert "Traceback" not in capfd.readouterr().err, "one message is enough"
