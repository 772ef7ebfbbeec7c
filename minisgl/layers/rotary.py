"""Rotary position embedding (Su et al. 2021) and the ways of stretching its context.

A pair of dimensions (i, i + rotary_dim / 2) turns by `position * inv_freq[i]`. The variants
change `inv_freq`, all but yarn nothing else:

    default     base ** -(2 i / rotary_dim)
    linear      divided by the factor (Chen et al. 2023)
    dynamic     default up to max_position; beyond it the angles would depend on the batch's
                longest sequence, so longer contexts are refused (`RotaryConfig.max_context`)
    llama3      low frequencies divided by the factor, high ones kept, a ramp between
    yarn        the same idea by number of rotations (Peng et al. 2023), and cos and sin are
                multiplied by an attention factor
    freq_factors  divided by given numbers (the `rope_freqs.weight` of GGUF files)

Every formula follows the order of operations in Hugging Face's `modeling_rope_utils`, so that
tables are equal bit for bit in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from minisgl.errors import UnsupportedModelError
from minisgl.kernel import apply_rope_inplace

from .base import StateLessOP

__all__ = [
    "ROPE_TYPES",
    "clear_rope_cache",
    "RotaryEmbedding",
    "get_rope",
    "max_context",
    "rope_type",
    "set_rope_device",
]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "freq_factors")

PostProcess = Callable[[torch.Tensor], torch.Tensor]


class RotaryEmbedding(StateLessOP):
    """Rotates the first `rotary_dim` dimensions of each head; the two halves are paired (NeoX).

    `post_process` maps the default `inv_freq [rotary_dim / 2]` to the variant's, and
    `attention_factor` multiplies cosines and sines. The table `_cos_sin_cache` is
    `[max_position, rotary_dim]` float32 (cosines, then sines) on the current default device.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        post_process: PostProcess | None = None,
        *,
        attention_factor: float = 1.0,
    ) -> None:
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise UnsupportedModelError(
                f"rotary_dim = {rotary_dim} must be even and from 2 to the head size {head_size}"
            )
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        inv_freq = 1.0 / (base**exponents)
        if post_process is not None:
            inv_freq = post_process(inv_freq)
        angles = torch.arange(max_position, dtype=torch.float)[:, None] * inv_freq
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self._cos_sin_cache = torch.cat((cos, sin), dim=-1)

    @property
    def cos_sin_cache(self) -> torch.Tensor:
        """`[max_position, rotary_dim]` float32: cosines, then sines."""
        return self._cos_sin_cache

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Rotate `query [T, Hq, D]` and `key [T, Hk, D]` in place by `positions [T]`."""
        apply_rope_inplace(positions, query, key, self.head_size, self._cos_sin_cache)


_rope_device: torch.device | None = None


def set_rope_device(device: torch.device | str | None) -> None:
    """Where tables are computed when the model is built on the meta device."""
    global _rope_device
    _rope_device = None if device is None else torch.device(device)


def get_rope(
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    scaling: Mapping[str, Any] | None = None,
    *,
    table_length: int | None = None,
) -> RotaryEmbedding:
    """The rotary embedding of these parameters; equal ones on one device share one table.

    `scaling` is a config's `rope_scaling`, with its type under `rope_type` or `type`.
    `table_length` makes the table shorter than the model's whole context.
    Raises `RuntimeError` on the meta device when `set_rope_device()` was not called, and
    `UnsupportedModelError` for an unknown type or a missing field.
    """
    device = torch.get_default_device()
    if device.type == "meta":
        if _rope_device is None:
            raise RuntimeError("Call set_rope_device() before building a model on meta device")
        device = _rope_device
    frozen = _freeze(scaling) if scaling else ()
    length = _stretched(max_position, scaling)
    if table_length is not None:
        length = min(length, table_length)
    return _build(head_dim, rotary_dim, max_position, float(base), frozen, length, device)


def clear_rope_cache() -> None:
    """Forget the shared tables; models that use one keep it."""
    _build.cache_clear()


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The type named by a config's scaling; `UnsupportedModelError` when it isn't known."""
    if not scaling:
        return "default"
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    if name not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"Unsupported RoPE type: {name!r}; supported: {', '.join(ROPE_TYPES)}"
        )
    return str(name)


def max_context(max_position: int, scaling: Mapping[str, Any] | None) -> int:
    """Positions that a model with this scaling can use.

    Published configs disagree on whether `max_position_embeddings` is the context before or
    after stretching; the larger reading holds for yarn and linear. llama3's factor divides
    frequencies and promises no length: its configs name the context themselves.
    """
    return max_position if rope_type(scaling) == "llama3" else _stretched(max_position, scaling)


def _stretched(max_position: int, scaling: Mapping[str, Any] | None) -> int:
    """Positions up to which the scaling reaches, whether or not the model promises them."""
    if scaling is None or rope_type(scaling) not in ("linear", "yarn", "llama3"):
        return max_position
    original = scaling.get("original_max_position_embeddings") or max_position
    return max(max_position, math.ceil(original * (scaling.get("factor") or 1.0)))


def _freeze(scaling: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in sorted(scaling.items())
    )


@lru_cache(maxsize=64)
def _build(
    head_dim: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    frozen: tuple[tuple[str, Any], ...],
    length: int,
    device: torch.device,
) -> RotaryEmbedding:
    scaling = dict(frozen)
    post, attention_factor = _variant(rope_type(scaling), rotary_dim, max_position, base, scaling)
    with torch.device(device):
        return RotaryEmbedding(
            head_dim, rotary_dim, length, base, post, attention_factor=attention_factor
        )


def _variant(
    kind: str, rotary_dim: int, max_position: int, base: float, scaling: dict[str, Any]
) -> tuple[PostProcess | None, float]:
    if kind in ("default", "dynamic"):
        return None, 1.0
    if kind == "freq_factors":
        factors = torch.tensor(_field(kind, scaling, "factors"), dtype=torch.float, device="cpu")
        return lambda inv_freq: inv_freq / factors.to(inv_freq.device), 1.0
    if kind == "linear":
        factor = _field(kind, scaling, "factor")
        return lambda inv_freq: inv_freq / factor, 1.0
    if kind == "llama3":
        return _llama3(kind, max_position, scaling), 1.0
    return _yarn(kind, rotary_dim, max_position, base, scaling)


def _field(kind: str, scaling: Mapping[str, Any], name: str) -> Any:
    if scaling.get(name) is None:
        raise UnsupportedModelError(f"RoPE type {kind!r} needs {name!r}; got {dict(scaling)}")
    return scaling[name]


def _llama3(kind: str, max_position: int, scaling: dict[str, Any]) -> PostProcess:
    factor = _field(kind, scaling, "factor")
    low = _field(kind, scaling, "low_freq_factor")
    high = _field(kind, scaling, "high_freq_factor")
    original = scaling.get("original_max_position_embeddings") or max_position

    def process(inv_freq: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / inv_freq
        kept_or_divided = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
        smooth = (original / wavelength - low) / (high - low)
        ramp = (1 - smooth) * kept_or_divided / factor + smooth * kept_or_divided
        between = ~(wavelength < original / high) & ~(wavelength > original / low)
        return torch.where(between, ramp, kept_or_divided)

    return process


def _yarn(
    kind: str, rotary_dim: int, max_position: int, base: float, scaling: dict[str, Any]
) -> tuple[PostProcess, float]:
    original = scaling.get("original_max_position_embeddings") or max_position
    factor = scaling.get("factor") or max_position / original
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = _yarn_mscale(factor)
        if mscale and all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns this often over the original context."""
        turns = original / (rotations * 2 * math.pi)
        return (rotary_dim * math.log(turns)) / (2 * math.log(base))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001

    def process(inv_freq: torch.Tensor) -> torch.Tensor:
        pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device=inv_freq.device)
        keep = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
        # 1 / (factor * f), not inv_freq / factor: the last bit must be Hugging Face's.
        steps = torch.arange(0, rotary_dim, 2, device=inv_freq.device).float() / rotary_dim
        stretched = 1.0 / (factor * base**steps)
        return stretched * (1 - keep) + inv_freq * keep

    return process, float(attention_factor)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
