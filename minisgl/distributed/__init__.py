"""Who this process is among the tensor-parallel ranks, and how ranks talk.

Owns: rank and size (`info.py`), the group of ranks and rank 0's commands to the others
(`group.py`), and the collectives on tensors (`impl.py`). Does not own: process start-up
(`scheduler/ranks.py`), or which tensors are sharded (that is `layers/` and `models/shard.py`).
Invariant: rank and size stay what they are while a model that was built by them is in use.
Read next: `minisgl/kernel/`.
"""

from __future__ import annotations

from .group import (
    CommandChannel,
    abort_group,
    find_store,
    join_group,
    leave_group,
    make_store,
)
from .impl import DistributedCommunicator
from .info import DistributedInfo, get_tp_info, set_tp_info

__all__ = [
    "CommandChannel",
    "DistributedCommunicator",
    "DistributedInfo",
    "abort_group",
    "find_store",
    "get_tp_info",
    "join_group",
    "leave_group",
    "make_store",
    "set_tp_info",
]
