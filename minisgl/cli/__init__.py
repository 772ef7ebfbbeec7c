"""The command line: `minisgl serve | chat | generate | batch | bench | inspect`.

Owns: flags (made from the config dataclasses by `flags.py`), one-line errors and exit codes
(`main.py`), and one module a command. Does not own: what the commands do with a model, which
is `llm/`, `server/`, `shell/` and `benchmark/`.
Invariant: a user's mistake prints one line that says what to change, and exits with 2.
Read next: `main.py`.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
