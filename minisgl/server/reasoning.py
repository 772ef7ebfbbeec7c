"""`ReasoningParser`: which answers are split into reasoning and content, and from what state."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.tokenizer import ReasoningSplitter, Tokenizer
from minisgl.tokenizer.reasoning import CLOSE_TAG, OPEN_TAG

from .protocol import ChatCompletionRequest

__all__ = ["ReasoningParser"]

_TAIL = 64
"""Tokens at the end of a prompt that are looked at: an opening tag and white space fit."""


class ReasoningParser:
    """Makes the splitters of a model's answers; `option` is the server's `--reasoning-parser`.

    `auto` splits if the chat template shows that the model thinks.
    """

    def __init__(self, option: str, tokenizer: Tokenizer | None) -> None:
        template = (tokenizer.chat_template if tokenizer is not None else None) or ""
        thinks = OPEN_TAG in template or "enable_thinking" in template
        self._tokenizer = tokenizer
        self._is_on = option == "think" or (option == "auto" and thinks)

    def splitters(
        self, request: ChatCompletionRequest, prompt_ids: Sequence[int]
    ) -> list[ReasoningSplitter | None]:
        """One for each of the request's `n` answers; None if its text is to stay whole."""
        if not self._is_on or not request.separate_reasoning or self._hides_tags(request):
            return [None] * request.n
        inside = self._ends_with_tag(prompt_ids)
        begun = request.final_text() if request.continue_final_message and not inside else ""
        splitters = [ReasoningSplitter(inside=inside) for _ in range(request.n)]
        for splitter in splitters:
            splitter.push(begun)
            splitter.flush()  # of the client's own text only the state matters
        return list(splitters)

    def _ends_with_tag(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the answer begins inside the thinking, as the chat template opened it.

        At the very end: a user's message may well have the tag in its text.
        """
        if self._tokenizer is None:
            return False
        tail = self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False)
        return tail.rstrip().endswith(OPEN_TAG)

    def _hides_tags(self, request: ChatCompletionRequest) -> bool:
        """Whether the closing tag is not in the text: all of it would seem to be reasoning."""
        if self._tokenizer is None or not request.skip_special_tokens:
            return False
        return self._tokenizer.backend.token_to_id(CLOSE_TAG) in self._tokenizer.special_ids
