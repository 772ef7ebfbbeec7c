"""The offline front: prompts in, finished texts out, in one process.

Owns: `LLM` (`llm.py`), checking prompts and parameters (`requests.py`), text and stop strings
of each sequence (`sequence.py`), the results (`outputs.py`). Does not own: batching
(`scheduler/`) or text processing (`tokenizer/`).
Invariant: results keep the order of the prompts, and a bad prompt raises before any runs.
Read next: `llm.py`.
"""

from __future__ import annotations

from .llm import LLM
from .outputs import CompletionOutput, RequestOutput, StreamChunk

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "StreamChunk"]
