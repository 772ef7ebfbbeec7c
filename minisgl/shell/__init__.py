"""The chat in a terminal. Lines in; answers, streamed, out.

Owns: the conversation, the `/` commands, what Ctrl-C means, what of a model's text may reach the
terminal (`shell.py`), reading `/params` (`params.py`). Does not own: generating (`llm/`) or the
command's flags (`cli/chat.py`).
Invariant: the conversation alternates user, assistant. A message enters it together with its
answer, so one that failed leaves no trace and the next attempt starts from the same place.
Read next: `shell.py`.
"""

from __future__ import annotations

from .shell import Shell

__all__ = ["Shell"]
