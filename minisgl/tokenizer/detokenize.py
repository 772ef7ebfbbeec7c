"""Text out of token ids that arrive one by one.

Invariant: all deltas and the flush, joined, equal the full decode of all ids. Which text is
certain before the rest is known depends on the tokenizer's decoder, hence two ways:

byte-level BPE      a token is bytes, and the text is all bytes read as UTF-8: an incremental
                    UTF-8 decoder does it, which holds at most the 3 bytes of an unfinished
                    character and gives U+FFFD at once for what can't become one.

everything else     a short window is decoded with and without the new tokens:

                        ... emitted ... | context | pending
                                        |<------ decode ----->|   text
                                        |<------->|               text known already

                    The context is the fewest emitted tokens that have text, so that rules for
                    the start of a text (the leading space that is dropped) have been used up
                    inside it and do not act on the pending tokens again.

In the second way, tokens `<0x00>` ... `<0xFF>` (byte fallback) are special: an unbroken run of
them is either valid UTF-8 as a whole and is shown as such, or each of its bytes is shown as
U+FFFD. So a run is held until it ends, or until it is certain to be invalid; from then on each
of its bytes is U+FFFD at once.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Protocol

import tokenizers

__all__ = ["BYTE_ALPHABET", "IncrementalDetokenizer", "TokenPieces"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CONTEXT = 8  # tokens kept as context if they have no text; also: tokens held for a "\ufffd"


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Visible Latin-1 characters stand for themselves; the other 68 bytes, in order, are the
    characters from U+0100 on. (Source: the byte alphabet of OpenAI's GPT-2 vocabulary.)
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in visible} | shifted


BYTE_ALPHABET = _byte_level_alphabet()


class TokenPieces:
    """What detokenizers ask about one tokenizer's tokens; shared by them, so it caches."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self.backend = backend
        self.special_ids = special_ids
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}

    def raw_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, cached; an id that is no token has none."""
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._compute_bytes(token_id)
        return piece

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for every other token."""
        if not self.has_byte_fallback:
            return None
        match = _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def decode(self, token_ids: list[int]) -> str:
        """The text of all these ids, special ones too."""
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:  # an added token, which is stored as plain text
                return token.encode("utf-8")
        byte = self.fallback_byte(token_id)
        return token.replace("▁", " ").encode("utf-8") if byte is None else bytes([byte])


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The types of the tokenizer's decoders in order."""
    if backend.decoder is None:
        return []
    # The pickled state of a decoder is its entry of tokenizer.json; to_str() of the whole
    # tokenizer would say the same after writing out the vocabulary.
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


class IncrementalDetokenizer:
    """The text of a growing sequence of ids, in deltas.

    `push` costs the same however long the sequence has become. Ids that are no token of the
    tokenizer (a model's padded vocabulary has some) have no text.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool = True) -> None:
        self._skip = pieces.special_ids if skip_special_tokens else frozenset()
        self._stream: _Stream = (
            _ByteStream(pieces) if pieces.is_byte_level else _WindowStream(pieces)
        )

    def push(self, token_id: int) -> str:
        """Add one id; the new text that is certain, which may be empty."""
        return "" if token_id in self._skip else self._stream.push(token_id)

    def flush(self) -> str:
        """The text still held at the end, with U+FFFD for an unfinished character."""
        return self._stream.flush()


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level tokens through an incremental UTF-8 decoder."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._pieces.raw_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other decoder through a window.

    Invariant: `decode(context)` is a prefix of `decode(context + pending)`, and the rest of it
    is the text that has not been emitted yet.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")()  # checks the run of byte tokens
        self._run_is_invalid = False

    def push(self, token_id: int) -> str:
        if self._pieces.backend.id_to_token(token_id) is None:
            return ""  # the full decode leaves it out, so it does not end a run of bytes either
        byte = self._pieces.fallback_byte(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._end_run()
        self._pending.append(token_id)
        text = self._window_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_CONTEXT:
            return ""  # a decoder this module does not know might be inside a character
        return self._emit(text)

    def flush(self) -> str:
        self._end_run()
        return self._emit(self._window_text())

    def _push_byte(self, token_id: int, byte: int) -> str:
        if self._run_is_invalid:
            return _REPLACEMENT  # the context, an earlier byte of this run, will do for the next
        self._pending.append(token_id)
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_is_invalid = True
            return self._emit(self._window_text())
        return ""

    def _end_run(self) -> None:
        self._utf8.reset()
        self._run_is_invalid = False

    def _window_text(self) -> str:
        return self._pieces.decode(self._context + self._pending)

    def _emit(self, text: str) -> str:
        """The part of the window's text that is new; the window moves past it."""
        delta = text[len(self._context_text) :]
        if self._pending:
            self._set_context(self._context + self._pending)
            self._pending = []
        return delta

    def _set_context(self, emitted: list[int]) -> None:
        """Make the fewest last tokens that have text the context."""
        for length in range(1, min(len(emitted), _MAX_CONTEXT) + 1):
            self._context = emitted[-length:]
            self._context_text = self._pieces.decode(self._context)
            if self._context_text:
                return
