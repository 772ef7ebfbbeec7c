"""The chat in a terminal. Lines in; answers, streamed, out.

    terminal <── lines, text ──> Shell ── messages ──> Backend ──> EngineBackend ──> AsyncEngine
                                       <── chunks ───          └─> UrlBackend ─────> any server

Owns: the conversation, the `/` commands, what Ctrl-C means (`shell.py`), what of a model's text
may reach the terminal (`terminal.py`), reading `/params` (`params.py`), and the client of a
server (`url_backend.py`, `events.py`). Does not own: generating (`server/async_engine.py`) or the
command's flags (`cli/chat.py`).
Invariant: the conversation alternates user, assistant. A message enters it together with its
answer, so one that failed leaves no trace and the next attempt starts from the same place.
Read next: `backend.py`, then `shell.py`; the shell is synchronous, and `loop.py` is how it stands
on asyncio.
"""

from __future__ import annotations

from .backend import Backend, Chunk
from .shell import Shell

__all__ = ["Backend", "Chunk", "Shell"]
