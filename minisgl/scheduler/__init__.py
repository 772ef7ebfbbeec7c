"""Which requests compute how many tokens in each step, and when they end.

Owns: the queue and its policies (`queue.py`), rows and page-table entries of the running requests
(`running.py`), the choice of each step's batch (`planner.py`), the life of requests and the plain
and the overlap loop (`scheduler.py`), when its steps were computed (`recorder.py`); making one with
its engine (`build.py`); telling other ranks its calls (`leading.py`), their processes (`ranks.py`,
`follower.py`) and other hosts (`nodes.py`, `other_node.py`); the process that runs it for a server
(`worker.py`). Does not own: the model (an injected `Executor` runs batches) or
pages (an injected cache hands them out).
Invariant: every request ends in exactly one terminal update; between steps every page is free,
cached or of exactly one request, and every row is free or of exactly one request.
Read next: `planner.py`, `scheduler.py`, then `minisgl/llm/`.
"""

from __future__ import annotations

from .build import build_scheduler
from .planner import Limits, Stats
from .scheduler import Scheduler, Update

__all__ = ["Limits", "Scheduler", "Stats", "Update", "build_scheduler"]
