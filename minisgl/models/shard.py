"""Which part of a checkpoint's tensor a tensor-parallel rank holds.

    find_cut(name, shape, rank, size, num_kv_heads)  ->  Cut(dim, spans) or None for all of it
    take(source, cut)                                ->  that part, of a tensor or of a file's slice
    Share(rank, size, ...).part(name, source, shape) ->  both, and none of other ranks' experts

The rules look at names and shapes only, so that a part is known before anything is read.

Expert parallelism, 5 experts over 2 ranks: whole experts, in whichever way they are stored.

    experts.gate_up_proj [5, 2 I, hidden]    rank 0: [0:3]          rank 1: [3:5]
    experts.{0 .. 4}.up_proj [I, hidden]     rank 0: 0, 1, 2        rank 1: 3, 4
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from minisgl.errors import CheckpointError
from minisgl.utils import Span, partition

__all__ = ["EXPERT", "Cut", "Share", "find_cut", "shard_tensor", "take"]

EXPERT = re.compile(r"(?P<stem>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)\.weight")
"""The name of a single expert's weight; `fullmatch` it."""


class Cut(NamedTuple):
    """Spans of dimension `dim`, which the rank holds one after another."""

    dim: int
    spans: tuple[Span, ...]


class Sliceable(Protocol):
    """A tensor, or one that is still in its file (safetensors' slices)."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Share:
    """What rank `rank` of `size` holds of a model; with `ep`, whole experts."""

    rank: int
    size: int
    num_kv_heads: int
    num_experts: int = 0
    ep: bool = False

    @property
    def experts(self) -> range:
        """The experts of which the rank holds anything: all without `ep`."""
        if not self.ep:
            return range(self.num_experts)
        span = partition(self.num_experts, self.rank, self.size)
        return range(span.start, span.end)

    def is_elsewhere(self, name: str) -> bool:
        """Whether this is a single expert's weight and another rank's.

        An id that the model doesn't have is nobody's: it is read, to be refused.
        """
        match = EXPERT.fullmatch(name)
        if match is None:
            return False
        expert = int(match["expert"])
        return expert < self.num_experts and expert not in self.experts

    def part(self, name: str, source: Sliceable, shape: Sequence[int]) -> torch.Tensor:
        """This rank's part of a tensor, or of one in its file, of this shape.

        What is elsewhere is not read: it comes on the meta device, whole, for its shape and dtype
        to be checked on every rank alike.
        """
        if self.is_elsewhere(name):
            nothing = source[0:0] if shape else source[...]
            return nothing.new_empty(tuple(shape), device="meta")
        cut = find_cut(name, shape, self.rank, self.size, self.num_kv_heads, self.ep)
        return take(source, cut)


def shard_tensor(
    name: str, tensor: torch.Tensor, rank: int, size: int, num_kv_heads: int
) -> torch.Tensor:
    """The part of a checkpoint's tensor that rank `rank` of `size` holds; a view if it can be.

    Attention projections are cut by head (KV heads are replicated when ranks outnumber them),
    gate, up, down and the vocabulary by ceil division, norms and the router not at all.
    """
    return take(tensor, find_cut(name, tensor.shape, rank, size, num_kv_heads))


def find_cut(
    name: str, shape: Sequence[int], rank: int, size: int, num_kv_heads: int, ep: bool = False
) -> Cut | None:
    """The rule behind `shard_tensor`; raises `CheckpointError` for a shape that it can't cut.

    With `ep`, packed experts are cut between them, and a single one, which some rank holds, not.
    """
    module, kind = name.split(".")[-2:] if "." in name else ("", name)
    dim = _cut_dim(module, kind)
    if ep and module == "experts":
        dim = 0
    elif ep and EXPERT.fullmatch(name):
        dim = None
    if size == 1 or dim is None:
        return None
    if dim >= len(shape):
        raise CheckpointError(f"{name} {tuple(shape)} has no dimension {dim}, which ranks share")
    total = shape[dim]
    if (module, kind) == ("experts", "gate_up_proj") and not ep:  # the halves are cut alike
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
