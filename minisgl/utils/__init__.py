"""Helpers that know nothing of the engine: integers, logging, registries, Hugging Face files.

Owns: generic code shared by every row above. Does not own: anything that mentions requests,
caches or models' internals. Read next: `minisgl/core.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_exports

if TYPE_CHECKING:
    from .hf import cached_load_hf_config, download_hf_weight
    from .misc import Span, align_down, align_up, div_ceil, div_even, partition
    from .registry import Registry
    from .torch_utils import dtype_name, parse_dtype, torch_dtype

_EXPORTS = {
    "cached_load_hf_config": "hf",
    "download_hf_weight": "hf",
    "Span": "misc",
    "align_down": "misc",
    "align_up": "misc",
    "div_ceil": "misc",
    "div_even": "misc",
    "partition": "misc",
    "Registry": "registry",
    "dtype_name": "torch_utils",
    "parse_dtype": "torch_utils",
    "torch_dtype": "torch_utils",
}

__all__ = list(_EXPORTS)  # noqa: PLE0605

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
