"""The online front: `AsyncEngine`, and the OpenAI-compatible server on top of it.

    HTTP ──> routes ──> AsyncEngine ──> text side ──> scheduler process ──> text side ──> ...
             (FastAPI)  (this process)  (threads, or  (minisgl.scheduler.worker)
                                        processes)

Owns: the engine for asyncio programs (`async_engine.py`) with its processes (`processes.py`),
the text side (`text.py`, `text_worker.py`, `tracker.py`) and what a caller holds of a request
(`generation.py`); the HTTP application (`app.py`) with its routes (`openai.py`, `native.py`,
`info.py`), request models (`protocol/`), errors, limits and observers (metrics, logs, trace); the
life of a server (`serve.py`). Does not own: the scheduler, or how text is made.
Invariant: every request ends in exactly one answer or error; whoever goes away, nothing of theirs
goes on running; when a process dies, everyone hears of it and nothing is left.
Read next: `generation.py`, `async_engine.py`, `openai.py`, then `serve.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .config import ServerConfig
    from .generation import Generation, Observer

_EXPORTS = {
    "AsyncEngine": "async_engine",
    "Generation": "generation",
    "Observer": "generation",
    "ServerConfig": "config",
}

__all__ = ["AsyncEngine", "Generation", "Observer", "ServerConfig"]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
