"""The bodies of OpenAI's requests: every parameter with its type, range, default and meaning.

Owns: what a client may send, strictly typed, as pydantic models that are also the schema in
`/openapi.json`; and its conversion to `SamplingParams`. Does not own: what needs the model
(vocabulary, context length) or the server's state. Invariant: whatever is accepted takes effect,
or its description says that it has none; everything else is refused with its name. Read next:
`base.py`, then `sampling.py`, then `chat.py` and `completion.py`.
"""

from __future__ import annotations

from .base import Body
from .chat import ChatCompletionRequest, ChatMessage
from .completion import CompletionRequest
from .sampling import SamplingBody, StreamOptions

__all__ = [
    "Body",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "SamplingBody",
    "StreamOptions",
]
