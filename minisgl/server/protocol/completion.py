"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from ..errors import shorten
from .base import Neutral
from .compat import ENGINES, STRUCTURED_OUTPUT
from .sampling import Logprobs, SamplingBody

__all__ = ["MAX_PROMPTS", "CompletionRequest", "IdLists", "Ids", "Text", "Texts", "check_ids"]

MAX_PROMPTS = 1024
"""Prompts in one request."""

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a request, whichever of the four forms they came in."""
    if not isinstance(value, list) or (value and type(value[0]) is int):
        return [_checked(value, "")]
    if not value:
        raise ValueError("is empty: give at least one prompt")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts: at most {MAX_PROMPTS} go into one request")
    if len({type(item) for item in value}) > 1:
        raise ValueError("mixes types: give strings only, or lists of token ids only")
    return [_checked(item, f" at [{index}]") for index, item in enumerate(value)]


def _checked(prompt: Any, where: str) -> str | list[int]:
    if not isinstance(prompt, (str, list)):
        raise ValueError(
            f"has {shorten(prompt)}{where}: must be a string, token ids, or a list of either"
        )
    if not prompt:
        raise ValueError(f"is empty{where}: give at least one token")
    if isinstance(prompt, list):
        check_ids(prompt, where)
    return prompt


def check_ids(ids: list[Any], where: str = "") -> None:
    """Raise `ValueError` for what is no token id, having looked at each as little as possible."""
    if not set(map(type, ids)) <= {int} or min(ids) < 0:
        bad = next(token for token in ids if type(token) is not int or token < 0)
        raise ValueError(f"has {shorten(bad)}{where}, which is no token id")


class CompletionRequest(SamplingBody):
    """Text or token ids to go on with."""

    neutral = {
        **STRUCTURED_OUTPUT,
        **ENGINES,
        "add_special_tokens": Neutral("way to leave them out: send token ids", (True,)),
        "separate_reasoning": Neutral("parser of reasoning outside of chats", (False,)),
        "suffix": Neutral("insertion before a suffix", ("",)),
    }

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts, json_schema_input_type=Text | Texts | Ids | IdLists),
    ]
    """A text, several, token ids, or several lists of them; up to 1024 in one request."""
    echo: bool = False
    """Put the prompt before the text."""
    logprobs: Logprobs | None = None
    """Return the log-probability of each token and those of this many most likely ones; with
    `echo`, of the prompt's tokens too."""

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more, none of them empty."""
        return self.prompt

    def _logprobs(self) -> dict[str, Any]:
        of_prompt = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            of_prompt = max(self.logprobs, of_prompt or 0)
        return {"logprobs": self.logprobs, "prompt_logprobs": of_prompt}
