"""minisgl: a compact engine for running and serving large language models.

    from minisgl import LLM, SamplingParams

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)

The folder tree is the architecture, lower rows first: `utils`, `core`, `distributed`,
`kernel`, `layers`, `models`, `kvcache` and `attention`, `engine`, `scheduler`, `tokenizer`,
`llm` and `cli`. Each package's docstring says what it owns and what to read next;
docs/architecture.md follows one request through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM, CompletionOutput, RequestOutput, StreamChunk
    from .params import SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
    "SamplingParams": "params",
    "StreamChunk": "llm",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamChunk"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import minisgl` alone stays instant."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
