"""Where the native kernels can't be compiled, PyTorch computes, and the log says once why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import ConfigError
from minisgl.kernel.cpu.build import has_native, library
from tests.helpers import TINY, random_prompts, save, tiny_hf_model

PROMPTS = random_prompts([5, 30], TINY["vocab_size"], seed=41)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
BROKEN = "#!/bin/sh\necho 'collect2: fatal error: no luck today' >&2\nexit 1\n"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save(tiny_hf_model("llama", seed=1), tmp_path / "llama")


@pytest.fixture(params=["missing", "broken"])
def compiler(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """What is wrong with the compiler, in the log's words; nothing is cached."""
    path, why = tmp_path / "no-c++", "there is no C++ compiler '{}': install g++ or set CXX"
    if request.param == "broken":
        path.write_text(BROKEN)
        path.chmod(0o755)
        why = "{} failed: collect2: fatal error: no luck today"
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    library.cache_clear()
    has_native.cache_clear()
    yield why.format(path)
    library.cache_clear()
    has_native.cache_clear()


def generate(folder: str, native: bool) -> list[list[int]]:
    with LLM(folder, dtype="float32", num_pages=32, threads=1) as llm:
        assert llm.engine.config.native == native
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_without_a_working_compiler_pytorch_computes(
    folder: str, compiler: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minisgl")
    first, second = generate(folder, native=False), generate(folder, native=False)
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    warnings = [r.getMessage() for r in records if r.name.startswith("minisgl.kernel")]
    assert warnings == [f"native CPU kernels are off, PyTorch computes: {compiler}"]
    assert "native = False: the native CPU kernels are not there" in caplog.text
    assert first == second
    with pytest.raises(ConfigError, match="native CPU kernels are not there"):
        LLM(folder, dtype="float32", deterministic=True)


def test_pytorch_computes_the_same_tokens(folder: str, compiler: str) -> None:
    without = generate(folder, native=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX")
        patch.delenv("MINISGL_CACHE_DIR")
        library.cache_clear()
        has_native.cache_clear()
        assert generate(folder, native=True) == without
