"""Which requests compute how many tokens in each step, and when they end.

Owns: the queues, the token budget, admission, retraction, the end of requests. Does not own:
the model (an injected `Executor` runs batches) or pages (an injected cache hands them out).
Invariant: every request ends in exactly one terminal update; between steps every page and row
is free or belongs to exactly one running request.
Read next: `scheduler.py`, then `minisgl/llm/`.
"""

from __future__ import annotations

from .scheduler import Limits, Scheduler, Update

__all__ = ["Limits", "Scheduler", "Update"]
