"""`AsyncEngine` in a user's program: a file that Python runs, without a guard for processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.life import make_endless_model

TIMEOUT_S = 90
PROGRAM = """
import asyncio
import json

from minisgl.errors import BusyError, EngineDeadError
from minisgl.params import SamplingParams
from minisgl.server import AsyncEngine

ENDLESS = SamplingParams(max_tokens=60000, ignore_eos=True)


async def use(**options):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    async with AsyncEngine("model", num_pages=2048, **options) as engine:
        whole = await engine.generate("hello", params)
        pieces = [piece async for piece in engine.stream("hello", params)]
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
        ids = await engine.encode_chat([{"role": "user", "content": "hello"}])
        assert await engine.decode(await engine.encode("hello")) == "hello"

        running = [asyncio.ensure_future(engine.generate(ids, ENDLESS)) for _ in range(3)]
        stream = engine.stream("hello", ENDLESS)
        await anext(stream)
        assert engine.num_live == 4
    ends = await asyncio.gather(*running, anext(stream), return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 4, ends
    try:
        await engine.generate("hello", params)
    except BusyError:
        pass
    return whole.outputs[0].token_ids


print(json.dumps([asyncio.run(use()), asyncio.run(use(tokenizer_workers=1))]))
"""
UNCLOSED = """
import asyncio
from minisgl.params import SamplingParams
from minisgl.server import AsyncEngine

async def main():
    engine = AsyncEngine("model", num_pages=64)
    await engine.start()
    output = await engine.generate("hello", SamplingParams(ignore_eos=True))
    print(output.outputs[0].finish_reason)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with modules that nobody may import from it."""
    folder = tmp_path_factory.mktemp("program")
    make_endless_model(folder / "model")
    for name in ("torch", "json", "tokenizers"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from here')", "utf-8")
    return folder


@pytest.fixture
def temporary() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="srv-"))
    yield path
    shutil.rmtree(path)


def run(folder: Path, temporary: Path, program: str) -> str:
    """What a program prints; it must end well, in silence, and leave nothing."""
    (folder / "program.py").write_text(program, "utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "program.py"],  # -I: the program itself looks nowhere here
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
    return done.stdout


def test_two_engines_after_one_another(folder: Path, temporary: Path) -> None:
    first, second = json.loads(run(folder, temporary, PROGRAM))
    assert first == second and len(first) == 8


def test_an_engine_that_nobody_closed_keeps_no_program_alive(folder: Path, temporary: Path) -> None:
    assert run(folder, temporary, UNCLOSED).split() == ["length"]
