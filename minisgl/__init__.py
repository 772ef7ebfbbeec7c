"""minisgl: a compact engine for running and serving large language models.

    from minisgl import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)

The folder tree is the architecture, lower rows first: `utils`, `core`, `message`, `distributed`,
`kernel`, `layers`, `models`, `kvcache` and `attention`, `engine`, `scheduler`, `tokenizer`,
`llm`, `server`, `shell`, `benchmark` and `cli`. Each package's docstring says what it owns and
what to read next; docs/architecture.md follows one request through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .llm import LLM, CompletionOutput, RequestOutput, StreamChunk
    from .params import SamplingParams
    from .server import AsyncEngine

__version__ = "0.1.0"

# On first use: `import minisgl` alone stays instant.
_EXPORTS = {
    "AsyncEngine": "server",
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
    "SamplingParams": "params",
    "StreamChunk": "llm",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
