"""Which part of a checkpoint's tensor a tensor-parallel rank holds.

    find_cut(name, shape, rank, size, num_kv_heads)  ->  Cut(dim, spans) or None for all of it
    take(source, cut)                                ->  that part, of a tensor or of a file's slice

The rules look at names and shapes only, so that a part is known before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from minisgl.errors import CheckpointError
from minisgl.utils import Span, partition

__all__ = ["Cut", "find_cut", "shard_tensor", "take"]


class Cut(NamedTuple):
    """Spans of dimension `dim`, which the rank holds one after another."""

    dim: int
    spans: tuple[Span, ...]


class Sliceable(Protocol):
    """A tensor, or one that is still in its file (safetensors' slices)."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def shard_tensor(
    name: str, tensor: torch.Tensor, rank: int, size: int, num_kv_heads: int
) -> torch.Tensor:
    """The part of a checkpoint's tensor that rank `rank` of `size` holds; a view if it can be.

    Attention projections are cut by head (KV heads are replicated when ranks outnumber them),
    gate, up, down and the vocabulary by ceil division, norms and the router not at all.
    """
    return take(tensor, find_cut(name, tensor.shape, rank, size, num_kv_heads))


def find_cut(
    name: str, shape: Sequence[int], rank: int, size: int, num_kv_heads: int
) -> Cut | None:
    """The rule behind `shard_tensor`; raises `CheckpointError` for a shape that it can't cut."""
    module, kind = name.split(".")[-2:] if "." in name else ("", name)
    dim = _cut_dim(module, kind)
    if size == 1 or dim is None:
        return None
    if dim >= len(shape):
        raise CheckpointError(f"{name} {tuple(shape)} has no dimension {dim}, which ranks share")
    total = shape[dim]
    if (module, kind) == ("experts", "gate_up_proj"):  # the halves are cut alike
        gate = partition(total // 2, rank, size)
        return Cut(dim, (gate, Span(total // 2 + gate.start, gate.length)))
    if module in ("k_proj", "v_proj") and num_kv_heads < size:
        rows, rest = divmod(total, num_kv_heads)
        if rest:
            raise CheckpointError(f"{name} {tuple(shape)} has no {num_kv_heads} heads of one size")
        return Cut(dim, (Span(rank * num_kv_heads // size * rows, rows),))
    return Cut(dim, (partition(total, rank, size),))


def take(source: Sliceable, cut: Cut | None) -> torch.Tensor:
    """What the cut leaves; a view of a tensor or of the mapped file where one span is all."""
    if cut is None:
        return source[...]
    whole = (slice(None),) * cut.dim
    indices = [whole + (slice(start, start + length),) for start, length in cut.spans]
    parts = [source[index] for index in indices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)


def _cut_dim(module: str, kind: str) -> int | None:
    """The dimension that ranks share, None for a tensor that each has whole."""
    if module == "experts":  # packed already: [E, 2 I, hidden] and [E, hidden, I]
        return {"gate_up_proj": 1, "down_proj": 2}.get(kind)
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return 0
    if module in ("o_proj", "down_proj") and kind == "weight":
        return 1
    return None
