"""The rank of this process and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DistributedInfo", "get_tp_info", "set_tp_info"]


@dataclass(frozen=True)
class DistributedInfo:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int
    size: int
    ep: bool = False
    """Expert parallelism: a rank holds whole experts, not a part of each."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    def is_primary(self) -> bool:
        """True on rank 0, which talks to the outside."""
        return self.rank == 0


_SINGLE = DistributedInfo(0, 1)
_info: DistributedInfo | None = None


def set_tp_info(info: DistributedInfo | None) -> None:
    """Say who this process is; allowed once, or again with the same values.

    With None it is nobody in particular any more: its models are closed.
    """
    global _info
    if info is not None and _info is not None and _info != info:
        raise RuntimeError(f"Tensor-parallel info is {_info} already; it can't become {info}")
    _info = info


def get_tp_info() -> DistributedInfo:
    """What `set_tp_info` said, or rank 0 of 1 when it was never called."""
    return _info or _SINGLE
