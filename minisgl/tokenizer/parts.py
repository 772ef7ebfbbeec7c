"""What every file format of a tokenizer is read into, and how special tokens are spelled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tokenizers

__all__ = ["TOKEN_NAMES", "TokenizerParts", "token_text"]

# The special tokens that have a name in tokenizer_config.json; templates see them under it.
TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as read: the Rust tokenizer, named special tokens, chat templates by name.

    `special_tokens` maps names out of TOKEN_NAMES to the tokens' text. The template to use is
    called "default"; one called "tool_use" takes its place when tools are given.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)


def token_text(value: Any) -> str | None:
    """A special token's text: config files write it as a string, or as a dict with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
