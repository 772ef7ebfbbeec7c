"""What this process may use: CPUs and memory within cgroup limits, and CUDA devices."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

__all__ = ["Hardware", "available_cpus", "available_memory_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Hardware:
    """The machine as `minisgl.config.resolve` sees it."""

    num_cpus: int
    available_bytes: int
    has_cuda: bool
    has_native: bool = False
    """Whether the native CPU kernels are there; `detect` does not look."""
    has_triton: bool = False
    """Whether Triton's kernels can be compiled and run."""
    why_no_triton: str = "Triton is not installed"
    has_flashinfer: bool = False
    num_gpus: int = 0

    @classmethod
    def detect(cls) -> Hardware:
        """Look at this machine."""
        why_no_triton = _why_no_triton()
        return cls(
            available_cpus(),
            available_memory_bytes(),
            torch.cuda.is_available(),
            has_triton=not why_no_triton,
            why_no_triton=why_no_triton,
            num_gpus=torch.cuda.device_count(),
            has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        )


def _why_no_triton() -> str:
    """In words; empty where Triton works."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if not os.environ.get("CC") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "there is no C compiler, which Triton builds its launchers with"
    return ""


def available_cpus(root: Path = _CGROUP) -> int:
    """CPUs this process may use: OMP_NUM_THREADS if set, else affinity and cgroup quota."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # cgroup v2 has one file, "<quota> <period>" or "max <period>"; a quota is rounded up.
    quota = _words(root / "cpu.max")
    if not quota:  # cgroup v1 has a file for each, and -1 for no quota
        quota = _words(root / "cpu/cpu.cfs_quota_us") + _words(root / "cpu/cpu.cfs_period_us")
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cpus = min(cpus, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, cpus)


def available_memory_bytes(root: Path = _CGROUP) -> int:
    """Memory that can still be taken without swapping: the machine's, or the cgroup's if less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _words(root / limit_file), _words(root / usage_file)
        if limit and usage and limit[0].isdigit():
            available = min(available, int(limit[0]) - int(usage[0]))
    return max(0, available)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
