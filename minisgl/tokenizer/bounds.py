"""How much text one token can stand for: what is certainly too long needn't be tokenized.

The bound holds for tokenizers that keep every byte of a text, each in one token. That is BPE over
bytes, or with a token for each byte that has no other, as long as nothing in front of it drops
text. For all others there is none.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from .detokenize import BYTE_ALPHABET

__all__ = ["TextBound", "text_bound"]

_NFC_SHRINKS = 4
"""3.5 at most, in fact: U+1FBE U+0308 U+0301, which are 7 bytes, become U+0390, which is 2."""
_USED = frozenset(range(0xF5)) - {0xC0, 0xC1}
"""The bytes that occur in UTF-8."""


class TextBound(NamedTuple):
    """What is known of a tokenizer's texts."""

    bytes_per_token: int
    """A token stands for no more than these, of UTF-8."""
    dropped: bytes
    """Bytes that have no token and leave no trace."""

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least."""
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.dropped)
        return -(-len(kept) // self.bytes_per_token)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """The bound that holds for a tokenizer; None if none is known. Reads the vocabulary."""
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    shrinks = _shrinks_by(_parts(backend.normalizer, "normalizers"))
    cuts = _parts(backend.pre_tokenizer, "pretokenizers")
    if (
        not isinstance(model, models.BPE)
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or shrinks is None
        or any(not _keeps_text(part) for part in cuts)
        or any(token.lstrip or token.rstrip for token in added)  # takes any number of spaces
    ):
        return None
    is_byte_level = any(part["type"] == "ByteLevel" for part in cuts)
    every_byte = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if is_byte_level:
        every_byte = BYTE_ALPHABET
    elif not model.byte_fallback:
        return None
    missing = [byte for token, byte in every_byte.items() if model.token_to_id(token) is None]
    if any(byte in _USED for byte in missing) and (shrinks > 1 or not is_byte_level):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    # At byte level a character of the vocabulary stands for a byte.
    longest = max(map(len, vocabulary if is_byte_level else map(str.encode, vocabulary)))
    for token in added:
        texts = [token.content]
        if token.normalized and backend.normalizer is not None:  # looked for in normalized text
            texts.append(backend.normalizer.normalize_str(token.content))
        longest = max(longest, *(len(text.encode()) for text in texts))
    return TextBound(longest * shrinks, bytes(missing))


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """A component's entry of tokenizer.json, as the list of what it consists of."""
    if component is None:
        return []
    # The pickled state of these is their entry, in which sequences may hold sequences.
    waiting, parts = [json.loads(component.__getstate__())], []
    while waiting:
        state = waiting.pop()
        if state["type"] == "Sequence":
            waiting += state[key]
        else:
            parts.append(state)
    return parts


def _shrinks_by(normalizers: list[dict[str, Any]]) -> int | None:
    """How many times fewer bytes they may leave of a text; None if any number."""
    factor = 1
    for state in normalizers:
        if state["type"] == "NFC":
            factor = _NFC_SHRINKS  # once: it does nothing to its own result
        elif state["type"] == "Replace":
            pattern = state["pattern"].get("String")  # or a regular expression
            if pattern is None or len(pattern.encode()) > len(state["content"].encode()):
                return None
        elif state["type"] != "Prepend":
            return None
    return factor


def _keeps_text(state: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts a text without dropping any of it."""
    if state["type"] == "Split":
        return bool(state["behavior"] != "Removed")
    return state["type"] in ("ByteLevel", "Digits", "Metaspace")
