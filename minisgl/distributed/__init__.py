"""Who this process is among the tensor-parallel ranks, and how ranks talk.

Owns: rank and size (`info.py`) and the collectives on tensors (`impl.py`). Does not own: process
start-up, or which tensors are sharded (that is `layers/` and `models/weight.py`).
Invariant: rank and size are set at most once a process; setting the same again is allowed.
Read next: `minisgl/kernel/`.
"""

from __future__ import annotations

from .impl import DistributedCommunicator
from .info import DistributedInfo, get_tp_info, set_tp_info

__all__ = ["DistributedCommunicator", "DistributedInfo", "get_tp_info", "set_tp_info"]
