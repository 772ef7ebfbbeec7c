"""The kernels' tests on libraries built otherwise: with sanitizers, without AVX-512, for any x86.

Each run is a `pytest` of its own on the tests named here. The optimizer is asked for little,
because what is tested are the sources, and with more the 64-byte vectors of a small instruction
set take minutes to compile.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from minisgl.kernel.cpu.build import build

ROOT = Path(__file__).resolve().parents[2]
LINEAR = "tests/unit/test_native_linear.py"
EXPERTS = "tests/unit/test_native_experts.py"
VALUES = "tests/model/test_native.py::"
BITS = "tests/model/test_native_bits.py::"
# Both types of attention, all of keys; a window, heads of 24 and 32 values, K-quants.
FEW = (
    LINEAR,
    EXPERTS,
    f"{BITS}test_chunks_and_page_sizes[mistral-window-int4-int8-keys]",
    f"{BITS}test_chunks_and_page_sizes[mistral-window-float32]",
    f"{BITS}test_greedy_tokens_are_those_of_the_logits[llama-bfloat16]",
)
VALUES_OF_ALL = (
    f"{VALUES}test_float32_equals_transformers_and_the_reference[llama-24-by-3-odd]",
    f"{VALUES}test_float32_equals_transformers_and_the_reference[qwen3-32-by-4-gelu-tied]",
    f"{VALUES}test_quantized_at_load_is_near_the_dequantized_model[int8-bfloat16]",
    f"{VALUES}test_a_gguf_file_kept_quantized_is_near_the_dequantized_model",
    f"{VALUES}test_keys_and_values_of_another_type",
)
MORE = (
    f"{BITS}test_what_a_page_held_before_does_not_matter",
    f"{BITS}test_batches[mistral-window-int4-int8-keys-3]",
    f"{BITS}test_batches[qwen2-moe-bfloat16-3]",
)
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-O1",
)
BEYOND = """
import tests.other_library
import torch
from minisgl.kernel.cpu import ThreadPool, ops, pack_weight
pool = ThreadPool(1)
weight = pack_weight(pool, torch.ones(32, 32))
print(ops.native_lookup(weight, torch.tensor([31])).sum().item())
ops.native_lookup(weight._replace(n=64), torch.tensor([32]))
print("read beyond the end")
"""

pytestmark = pytest.mark.slow
needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor"
)


def python(
    library: Path, *args: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with that library."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MINISGL_TEST_LIBRARY": str(library),
            **(env or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=300,
    )


def run_tests(library: Path, *tests: str, env: Mapping[str, str] | None = None) -> None:
    # -v undoes the project's -q: the header names the library. -s: sanitizers end the process
    # in which pytest would keep what they said.
    plugin = ("-p", "tests.other_library", "-p", "no:cacheprovider", "-v", "-s", "-x")
    done = python(library, "-m", "pytest", *plugin, *tests, env=env)
    assert done.returncode == 0, _end(done.stdout)
    assert f"native kernels: {library}" in done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout


def _end(output: str) -> str:
    """From the sanitizer's message on, if there is one."""
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if "runtime error:" in line or "==ERROR:" in line]
    return "\n".join(lines[starts[0] :][:40] if starts else lines[-80:])


@pytest.fixture(scope="module")
def sanitized() -> tuple[Path, dict[str, str]]:
    """The library, and what a process that loads it needs."""
    preload = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"the C++ compiler has no {name}")
        preload.append(path)
    return build(SANITIZE), {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python never frees all
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_the_sanitizer_sees_a_read_beyond_the_end(sanitized: tuple[Path, dict[str, str]]) -> None:
    done = python(sanitized[0], "-c", BEYOND, env=sanitized[1])
    assert done.returncode != 0
    assert done.stdout.startswith("32.0\n")
    assert "AddressSanitizer: heap-buffer-overflow" in done.stdout
    assert "read beyond" not in done.stdout


def test_sanitizers_find_nothing(sanitized: tuple[Path, dict[str, str]]) -> None:
    run_tests(sanitized[0], *FEW, *MORE, env=sanitized[1])


@needs_x86
def test_avx2() -> None:
    run_tests(build(("-mno-avx512f", "-O1")), *FEW, *MORE, *VALUES_OF_ALL)


@needs_x86
def test_any_x86() -> None:
    run_tests(build(("-march=x86-64", "-O0")), *FEW, *VALUES_OF_ALL)
