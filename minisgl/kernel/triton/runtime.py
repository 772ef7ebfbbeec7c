"""What all Triton kernels share: whether they can run, and how they are launched.

Kernels are launched so that the next one may begin while the last one ends (programmatic
dependent launch, on devices of compute capability 9.0 and later): each calls `enter(PDL)` before
it touches memory that an earlier kernel may still write or read. Under Triton's interpreter
(`TRITON_INTERPRET=1`) the same kernels run on CPU tensors, which is how they are tested there.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "enter", "num_sms", "pdl", "reads_shared", "shared_bytes"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Read once, as Triton does when a kernel is decorated."""


@triton.jit
def enter(PDL: tl.constexpr):
    """Wait for the kernels before this one, and let the next one be put on the device."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched before the one before has ended."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl(x: torch.Tensor) -> dict[str, bool]:
    """The launch arguments `PDL` and, where it is on, `launch_pdl`, for kernels on x's device."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(x.device) else {"PDL": False}


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; no limit where kernels are interpreted."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack the field
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def reads_shared(device: torch.device) -> bool:
    """Whether tensor cores multiply from shared memory: Hopper's, and those of the data center
    cards after it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`; some number where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
