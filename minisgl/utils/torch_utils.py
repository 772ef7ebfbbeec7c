"""Small helpers around torch's global state and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["DTYPES", "dtype_name", "parse_dtype", "torch_dtype"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


@contextmanager
def torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` torch's default floating dtype inside the block, and restore it after."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def parse_dtype(name: str) -> torch.dtype:
    """`"bfloat16"`, `"bf16"`, ... as a torch dtype; ValueError names the known ones."""
    key = _ALIASES.get(name, name)
    if key not in DTYPES:
        raise ValueError(f"Unknown dtype {name!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[key]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
