"""Compiling and finding the native library: once, by source and flags, also by two at a time.

The sources here are a few lines, which compile in no time.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minisgl.kernel.cpu import build as native
from minisgl.kernel.cpu.build import BuildError, build

SOURCE = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""


class Compiler:
    """`CXX`: the machine's compiler, which takes its time and writes down each compilation."""

    def __init__(self, folder: Path, sleep_s: float = 0.0) -> None:
        self.path, self._log = folder / "compiler", folder / "compiler.log"
        real = shutil.which(os.environ.get("CXX", "c++"))
        assert real is not None, "these tests need a C++ compiler"
        self.path.write_text(
            f"#!/bin/sh\n"
            f'case " $* " in *\' -c \'*) echo "$*" >> {shlex.quote(str(self._log))};; esac\n'
            f"sleep {sleep_s}\n"
            f'exec {shlex.quote(real)} "$@"\n'
        )
        self.path.chmod(0o755)

    @property
    def compilations(self) -> int:
        """Files compiled so far."""
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a small library, an empty cache folder."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(native, "SOURCES", folder)
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_the_same_sources_are_compiled_once(sources: Path, compiler: Compiler) -> None:
    path = build()
    assert answer(path) == 42
    assert compiler.compilations == 1
    before = path.stat().st_mtime_ns
    assert build() == path
    assert path.stat().st_mtime_ns == before
    assert compiler.compilations == 1


def test_other_flags_sources_and_processors_make_another_library(
    sources: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build(), build(("-DANSWER_TWICE",))]
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    paths.append(build())
    assert [answer(path) for path in paths] == [42, 42, 43]
    monkeypatch.setattr(native, "_cpu_features", lambda: "flags : sse2")
    paths.append(build())
    assert len(set(paths)) == compiler.compilations == 4


def test_the_cache_folder_is_the_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "own"))
    assert native._cache() == tmp_path / "own" / "kernels"
    monkeypatch.delenv("MINISGL_CACHE_DIR")
    assert native._cache() == tmp_path / "xdg" / "minisgl" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native._cache() == Path.home() / ".cache" / "minisgl" / "kernels"


BUILD = """
import sys, time
from pathlib import Path
from minisgl.kernel.cpu import build
build.SOURCES = Path(sys.argv[1])
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.01)
print(build.build())
"""


def test_two_processes_at_once_compile_once(sources: Path, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, sleep_s=0.5)  # both come while the first one compiles
    go, ready = tmp_path / "go", [tmp_path / "ready0", tmp_path / "ready1"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(sources), str(file), str(go)],
            env={**os.environ, "CXX": str(compiler.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for file in ready
    ]
    end = time.monotonic() + 60
    while not all(file.exists() for file in ready) and time.monotonic() < end:
        time.sleep(0.01)
    go.touch()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    path = Path(outputs[0].strip())
    assert answer(path) == 42
    assert compiler.compilations == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name], "something was left"


def test_what_the_compiler_says_is_in_the_error(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.h").write_text("#define ANSWER forty_two\n")
    with pytest.raises(BuildError, match=r"c\+\+ failed: .*forty_two") as caught:
        build()
    assert "\n" not in str(caught.value)
    # Nothing half done is taken for a library, and mended sources compile.
    assert not list((tmp_path / "cache").rglob("*.so"))
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    assert answer(build()) == 42


def test_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler '/nonexistent/c\+\+': install g\+\+ or set CXX"
    ):
        build()
    # A library that is there already needs none.
    monkeypatch.delenv("CXX")
    path = build()
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert build() == path


def test_a_cache_that_cannot_be_written(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        build()
