"""The native kernels' ends: forks, exits, and where they are asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.kernel.cpu import ThreadPool, has_native, pack_weight
from minisgl.kernel.cpu.ops import native_linear, native_lookup
from minisgl.utils.hardware import Hardware

if not has_native():
    pytest.skip("the native kernels could not be compiled here", allow_module_level=True)

FORKED = """
import os, sys
from minisgl.kernel.cpu import ThreadPool
pool = ThreadPool(2)
child = os.fork()
if child == 0:
    del pool
    sys.exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""
EXITED = """
import sys, threading, time, torch
from minisgl.kernel.cpu import ThreadPool, pack_weight
from minisgl.kernel.cpu.ops import native_linear
pool = ThreadPool(2)
weight, x = pack_weight(pool, torch.randn(4096, 512)), torch.randn(256, 512)
def work():
    while True:
        native_linear(pool, x, [weight])
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.parametrize("program", [FORKED, EXITED])
def test_processes_end_well(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_cpu_beside_a_gpu_runs_native_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from minisgl.config import EngineConfig
    from minisgl.models import load_model_info
    from minisgl.scheduler.build import build_scheduler
    from tests.helpers import save, tiny_hf_model

    path = save(tiny_hf_model("llama"), tmp_path)
    detected = replace(Hardware.detect(), has_cuda=True)
    monkeypatch.setattr(Hardware, "detect", lambda: detected)
    built = build_scheduler(path, load_model_info(path), EngineConfig(device="cpu", num_pages=8))
    assert built.config.native
    built.engine.close()


def test_strided_arguments_are_read_as_they_are() -> None:
    pool = ThreadPool(1)
    weight = torch.randn(64, 32)
    packed = pack_weight(pool, weight)
    ids = torch.randint(64, (40, 2))[:, 0]
    assert torch.equal(native_lookup(packed, ids), weight[ids])
    x, bias = torch.randn(3, 32), torch.randn(64, 2)[:, 0]
    torch.testing.assert_close(native_linear(pool, x, [packed], bias), x @ weight.T + bias)


def test_blocks_of_another_size_or_type_are_refused() -> None:
    pool = ThreadPool(1)
    for tensor in (torch.zeros(2, 50, dtype=torch.uint8), torch.zeros(2, 34)):
        with pytest.raises(ValueError, match="Q8_0 blocks are uint8 rows of a multiple of 34"):
            pack_weight(pool, tensor, "Q8_0")
