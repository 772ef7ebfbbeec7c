"""Log-probabilities in the shapes that clients expect.

A token is named by its text alone. Two kinds of tokens have none that could be shown: part of a
character is spelled `bytes:\\xe2\\x82`, as OpenAI does, and an id without any text
`token_id:7`, which also tells apart two tokens of the same text where names are keys.

Lists are JSON already (`large.JsonList`), as they may be long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from typing_extensions import TypedDict

from minisgl.core import TokenLogprobs
from minisgl.tokenizer import Tokenizer

from .large import JsonList, written

__all__ = [
    "ChatLogprobs",
    "PromptLogprob",
    "PromptLogprobs",
    "TextColumns",
    "TextLogprobs",
    "TextOffsets",
    "TokenText",
    "TokenTexts",
    "chat_logprobs",
    "prompt_logprobs",
]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON can't write."""


class TopLogprob(TypedDict):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token at a place, and the most likely ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion: four lists with an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The token itself is among them."""
    text_offset: list[int]
    """Where in the choice's text the token begins, in characters."""


class PromptLogprob(TypedDict):
    """One token that was likely at a place of the prompt, or is there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By token id, an entry a token of the prompt; the first one has none."""


class TokenText(NamedTuple):
    """How a token is shown."""

    text: str
    bytes: list[int] | None
    """None without a tokenizer."""
    num_chars: int
    """Characters that begin in it."""


class TokenTexts:
    """The texts of a model's tokens, each looked up once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self.special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> TokenText:
        raw = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        if not raw:
            return TokenText(_by_id(token_id), None if raw is None else [], 0)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        num_chars = sum(byte & 0xC0 != 0x80 for byte in raw)  # all but continuation bytes
        return TokenText(text, list(raw), num_chars)


class TextOffsets:
    """Where the tokens of one text begin in it, in characters, told from the tokens.

    Special tokens are left out of a text that is being generated if `skip_special_tokens`; in a
    `text` that is there already, they are where it shows them.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        begin: int = 0,
        skip_special_tokens: bool = False,
        text: str | None = None,
    ) -> None:
        self._texts = texts
        self._next = begin
        self._skip = skip_special_tokens
        self._text = text

    def place(self, token_ids: Iterable[int]) -> list[int]:
        """The places of the next tokens."""
        places = []
        for token_id in token_ids:
            places.append(self._next)
            if token_id not in self._texts.special_ids or self._shows(token_id):
                self._next += self._texts[token_id].num_chars
        return places

    def _shows(self, special_id: int) -> bool:
        if self._text is None:
            return not self._skip
        return self._text.startswith(self._texts[special_id].text, self._next)


def chat_logprobs(entries: Iterable[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """The shape of chat completions."""

    def shown(token_id: int, logprob: float) -> TopLogprob:
        text = texts[token_id]
        return {"token": text.text, "logprob": max(logprob, _LEAST), "bytes": text.bytes}

    content: Iterator[TokenLogprob] = (
        {
            **shown(entry.token_id, entry.logprob),
            "top_logprobs": [shown(token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    )
    return {"content": written(content), "refusal": None}


class TextColumns:
    """The shape of completions, with the `top` most likely tokens and the token itself."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._columns = {name: JsonList() for name in TextLogprobs.__annotations__}

    def copy(self) -> TextColumns:
        """One that grows by itself."""
        other = TextColumns(self._texts, self._top)
        other._columns = {name: column.copy() for name, column in self._columns.items()}
        return other

    def add(
        self,
        token_ids: Iterable[int],
        entries: Sequence[TokenLogprobs | None],
        places: list[int],
    ) -> None:
        """Append tokens; `places` are those of `TextOffsets`."""
        texts, top = self._texts, self._top
        new: dict[str, Iterable[Any]] = {
            "tokens": (texts[token_id].text for token_id in token_ids),
            "token_logprobs": (None if e is None else max(e.logprob, _LEAST) for e in entries),
            "top_logprobs": (None if e is None else _by_text(e, texts, top) for e in entries),
            "text_offset": places,
        }
        for name, items in new.items():
            self._columns[name].extend(items)

    def shape(self) -> TextLogprobs:
        """All that was added."""
        return cast(TextLogprobs, {name: column.raw() for name, column in self._columns.items()})


def prompt_logprobs(
    entries: Iterable[TokenLogprobs | None], texts: TokenTexts, *, top: int
) -> PromptLogprobs:
    """The shape that vLLM gives a prompt's: the token itself and the `top` most likely ones."""

    def shaped(entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranked = [(*pair, rank) for rank, pair in enumerate(entry.top[:top], 1)]
        own = (entry.token_id, entry.logprob, entry.rank)
        return {
            token_id: {
                "logprob": max(logprob, _LEAST),
                "rank": rank,
                "decoded_token": texts[token_id].text,
            }
            for token_id, logprob, rank in (*ranked, own)
        }

    return written(None if entry is None else shaped(entry) for entry in entries)


def _by_text(entry: TokenLogprobs, texts: TokenTexts, top: int) -> dict[str, float]:
    """Log-probabilities by the tokens' texts; of equal texts, the later token goes by its id."""
    shaped: dict[str, float] = {}
    pairs = dict([(entry.token_id, entry.logprob), *entry.top[:top]])
    for token_id, logprob in pairs.items():
        text = texts[token_id].text
        shaped[_by_id(token_id) if text in shaped else text] = max(logprob, _LEAST)
    return shaped


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"
