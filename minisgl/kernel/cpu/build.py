"""Compile the C++ sources for this CPU, once, and load them.

The library lies in a cache folder (`MINISGL_CACHE_DIR`, or `~/.cache/minisgl`), named by a hash of
the sources, the compiler's flags and the CPU's features: another CPU or another version compiles
its own. Two processes may build at once: one waits for the other's lock, and a finished library
is moved into place in one step.

Without a compiler nothing breaks: `has_native` is False, the log says once why, and PyTorch
computes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl.utils.logger import get_logger

__all__ = ["BuildError", "build", "has_native", "library"]

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"
_ARM = platform.machine() in ("aarch64", "arm64")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-mcpu=native" if _ARM else "-march=native",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wno-psabi",  # vectors are passed inside this library only
    "-Wno-maybe-uninitialized",  # GCC 12 warns about its own intrinsics
)


class BuildError(RuntimeError):
    """The sources could not be compiled; the message says why."""


@functools.cache
def has_native() -> bool:
    """Whether the native kernels are there; compiles them when they are not yet."""
    try:
        library()
    except (BuildError, ImportError, OSError) as error:
        logger.warning("native CPU kernels are off, PyTorch computes: %s", error)
        return False
    return True


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; raises `BuildError` or `OSError`."""
    path = str(build())
    try:
        return ctypes.CDLL(path)
    except OSError:
        # Some linkers keep the builder's own library as needed, though nothing in it is used.
        import tvm_ffi  # noqa: F401 (loads it)

        return ctypes.CDLL(path)


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """The path of the compiled library, after compiling it if nobody has.

    `extra_flags` are added to the compiler's, for a library of its own (sanitizers, other
    instruction sets). Raises `BuildError`.
    """
    flags = (*FLAGS, *extra_flags)
    path = _cache() / _key(flags) / "libminisgl_cpu.so"
    if path.is_file():
        return path
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(str(path.parent) + ".lock"):
        if not path.is_file():
            _compile(flags, path)
    return path


def _compile(flags: tuple[str, ...], path: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0] if compiler.split() else "") is None:
        raise BuildError(f"there is no C++ compiler {compiler!r}: install g++ or set CXX")
    from tvm_ffi import cpp

    start = time.perf_counter()
    logger.info("compiling the native CPU kernels, once for this CPU")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, _scripts_on_path():
        try:
            built = cpp.build(
                "minisgl_cpu",
                cpp_files=[str(file) for file in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=list(flags),
                extra_ldflags=[flag for flag in flags if flag.startswith("-fsanitize")],
                build_directory=folder,
            )
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or [str(error)]
            raise BuildError(f"{compiler} failed: {lines[0][:500]}") from error
        os.replace(built, path)
    logger.info("compiled in %.1f s: %s", time.perf_counter() - start, path)


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """The build runs `ninja`, which pip put beside this interpreter: perhaps not in PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), before))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _cache() -> Path:
    asked = os.environ.get("MINISGL_CACHE_DIR")
    if asked:
        return Path(asked) / "kernels"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home directory
        raise BuildError(
            f"no folder for compiled kernels ({error}): set MINISGL_CACHE_DIR"
        ) from error
    return home / "minisgl" / "kernels"


def _key(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, platform.machine(), _cpu_features())).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: the processor's name has to do
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
