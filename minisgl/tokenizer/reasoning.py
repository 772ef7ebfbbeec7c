"""The thoughts of a thinking model, split from its answer in text that arrives in pieces.

    START ──<think>──> OPENED ──> THINKING ──</think>──> CLOSED ──> CONTENT
      │                   └───────────</think>──────────────┘          ^
      └──────────────────── any other text ────────────────────────────┘

OPENED and CLOSED drop the white space that follows a tag. Before a closing tag it goes too, so
in THINKING what may be that, or a part of the tag, is held back:

    text so far   ... I   s e e . \\n < / t h
                  emitted       | blanks | tag
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["CLOSE_TAG", "OPEN_TAG", "ReasoningSplitter", "SplitText"]

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class SplitText(NamedTuple):
    """What one delta made certain of either part."""

    reasoning: str
    content: str


class _Phase(Enum):
    """What the text so far ends with; see the module."""

    START = auto()
    OPENED = auto()
    THINKING = auto()
    CLOSED = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Splits a stream of text into reasoning and content.

    The opening tag counts only at the beginning, after white space at most; behind the closing
    one all is content. `inside` means that the opening tag was the end of the prompt. The white
    space around the tags is dropped, all other text is kept; so is all of it if there is no tag.

    >>> splitter = ReasoningSplitter(inside=False)
    >>> [tuple(splitter.push(delta)) for delta in ("<thi", "nk> a", " </think>", " b")]
    [('', ''), ('a', ''), ('', ''), ('', 'b')]
    """

    def __init__(
        self, open_tag: str = OPEN_TAG, close_tag: str = CLOSE_TAG, *, inside: bool
    ) -> None:
        self._open_tag = open_tag
        self._close_tag = close_tag
        self._phase = _Phase.OPENED if inside else _Phase.START
        self._blanks: list[str] = []  # a list: there may be any number, a delta each
        self._tag = ""  # its beginning, so far

    def push(self, delta: str) -> SplitText:
        """Add `delta`; the text that belongs to either part for certain."""
        reasoning, rest = "", delta
        if self._phase is _Phase.START:
            rest = self._begin(rest)
        if self._phase in (_Phase.OPENED, _Phase.THINKING):
            reasoning, rest = self._think(rest)
        if self._phase is _Phase.CLOSED:
            rest = rest.lstrip()
            if rest:
                self._phase = _Phase.CONTENT
        return SplitText(reasoning, rest)

    def flush(self) -> SplitText:
        """The text still held back at the end: it was neither a tag nor before one."""
        held = self._release(self._tag)
        self._tag = ""
        if self._phase in (_Phase.OPENED, _Phase.THINKING):
            return SplitText(held, "")
        return SplitText("", held)

    def _begin(self, delta: str) -> str:
        """Look for the opening tag; what follows it, or the content if there is none."""
        if not self._tag:
            text = delta.lstrip()
            self._blanks.append(delta[: len(delta) - len(text)])
        else:
            text = self._tag + delta
        if text.startswith(self._open_tag):
            self._phase, self._tag = _Phase.OPENED, ""
            self._blanks.clear()
            return text[len(self._open_tag) :]
        if self._open_tag.startswith(text):
            self._tag = text
            return ""
        self._phase, self._tag = _Phase.CONTENT, ""
        return self._release(text)

    def _think(self, delta: str) -> SplitText:
        """Look for the closing tag; the reasoning before it, and what follows it."""
        text = self._tag + delta
        end = text.find(self._close_tag)
        if end >= 0:
            reasoning = self._thought(text[:end])
            self._phase, self._tag = _Phase.CLOSED, ""
            self._blanks.clear()
            return SplitText(reasoning, text[end + len(self._close_tag) :])
        end = len(text) - _overlap(text, self._close_tag)
        self._tag = text[end:]
        return SplitText(self._thought(text[:end]), "")

    def _thought(self, text: str) -> str:
        """Reasoning without the white space at either end, of which the last is held back."""
        if self._phase is _Phase.OPENED:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._blanks.append(text)
            return ""
        self._phase = _Phase.THINKING
        reasoning = self._release(body)
        self._blanks.append(text[len(body) :])
        return reasoning

    def _release(self, text: str) -> str:
        """The white space held back, and `text` after it."""
        released = "".join((*self._blanks, text))
        self._blanks.clear()
        return released


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag`, short of all of it, that `text` ends with."""
    if tag[0] not in text:
        return 0  # the usual case
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
