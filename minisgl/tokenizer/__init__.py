"""Text to token ids and back: tokenizers, chat templates, incremental text, stop strings,
reasoning.

Owns: reading a model's tokenizer (a Hugging Face folder or a GGUF file), rendering chat
templates in a sandbox, turning ids into text one token at a time, finding stop strings in that
text, and telling what a model thinks from what it answers. Does not own: which ids end a request
(the scheduler), or the messages between processes. Needs neither torch nor, for a model that has
a `tokenizer.json`, transformers.

Invariant: the deltas of a detokenizer, joined, are `Tokenizer.decode` of all its ids; and what
a stop checker emits, joined, is the text up to the first stop string.

Read next: `tokenizer.py`, then `detokenize.py`, `stop.py` and `reasoning.py`, then
`chat_template.py` with `renderer.py`, which runs templates in processes of their own
(`render_worker.py`); `folder.py` and `gguf.py` hold the two file formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports

if TYPE_CHECKING:
    from .chat_template import ChatTemplate, check_template_kwargs
    from .detokenize import IncrementalDetokenizer
    from .reasoning import ReasoningSplitter, SplitText
    from .renderer import TemplateRenderer
    from .stop import StopResult, StopStringChecker
    from .tokenizer import Tokenizer

_EXPORTS = {
    "ChatTemplate": "chat_template",
    "check_template_kwargs": "chat_template",
    "IncrementalDetokenizer": "detokenize",
    "ReasoningSplitter": "reasoning",
    "SplitText": "reasoning",
    "StopResult": "stop",
    "StopStringChecker": "stop",
    "TemplateRenderer": "renderer",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "ReasoningSplitter",
    "SplitText",
    "StopResult",
    "StopStringChecker",
    "TemplateRenderer",
    "Tokenizer",
    "check_template_kwargs",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
