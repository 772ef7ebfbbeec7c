"""`SamplingParams`: how one request wants its tokens chosen, checked when it is made."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidRequestError
from .utils.flags import option

__all__ = [
    "GREEDY_BELOW",
    "MAX_BIASES",
    "MAX_INTEGER",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "MAX_STOP_IDS",
    "SamplingParams",
    "is_text",
]

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy: dividing by them would overflow."""
MAX_INTEGER = 2**63 - 1
"""Of all integers that have no lower limit: larger ones can't be sent to another process."""
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of each stop string."""
MAX_STOP_IDS = 128
MAX_BIASES = 1024

_MAX_SHOWN = 200  # characters of a bad value in its error


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    A field left at None takes the model's default (`generation_config.json`), then OpenAI's
    (see `resolve_defaults`). Values out of range raise `InvalidRequestError` at once.
    """

    max_tokens: int | None = option(
        None, "most tokens to generate (default: 16 for a plain prompt, what fits for a chat)"
    )
    temperature: float | None = option(None, "0 to 2; 0 and anything below 1e-5 is greedy")
    top_p: float | None = option(
        None, "keep the fewest most likely tokens whose probabilities reach this, in (0, 1]"
    )
    top_k: int | None = option(None, "keep this many most likely tokens; -1 or 0 keeps all")
    min_p: float | None = option(
        None, "keep tokens at least this likely relative to the most likely one, 0 to 1"
    )
    presence_penalty: float = option(
        0.0, "subtracted once from the logit of each token generated so far, -2 to 2"
    )
    frequency_penalty: float = option(
        0.0, "subtracted for each time a token was generated so far, -2 to 2"
    )
    repetition_penalty: float | None = option(
        None, "divides (multiplies, if negative) the logits of tokens in prompt and output; above 0"
    )
    n: int = option(1, "sequences to generate for the prompt, 1 to 128")
    seed: int | None = option(None, "64-bit seed; without one, each request draws its own")
    stop: Sequence[str] = option((), "string that ends the text; up to 16")
    stop_token_ids: Sequence[int] = option((), "token id that ends the text besides EOS; up to 128")
    include_stop_str_in_output: bool = option(False, "keep the stop string in the text")
    ignore_eos: bool = option(False, "go on after an EOS id")
    min_tokens: int = option(0, "no EOS or stop id before this many tokens; at most max_tokens")
    logit_bias: Mapping[int, float] = option(
        factory=dict,
        help="added to the logits of these token ids (up to 1024), each in [-100, 100]",
    )
    logprobs: int | None = option(
        None, "return log-probabilities of each token and this many most likely, 0 to 20"
    )
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens, 0 to 20")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", tuple(_items("stop", stop, MAX_STOPS)))
        self._set(
            "stop_token_ids", tuple(_items("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS))
        )
        if not isinstance(self.logit_bias, Mapping):
            raise _bad("logit_bias", self.logit_bias, "must map token ids to numbers")
        _check_count("logit_bias", len(self.logit_bias), MAX_BIASES)
        self._set("logit_bias", dict(self.logit_bias))
        self._check_scalars()
        self._check_lists()

    def _set(self, name: str, value: object) -> None:
        """In an object that nobody else has seen yet."""
        object.__setattr__(self, name, value)

    def _check_scalars(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, optional=False)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, optional=False)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _integer("n", self.n, 1, MAX_N, optional=False)
        _integer("seed", self.seed, -(2**63), 2**63 - 1)
        most = MAX_INTEGER if self.max_tokens is None else self.max_tokens
        _integer("min_tokens", self.min_tokens, 0, most, optional=False)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.repetition_penalty is not None:  # an integer of any size can't be sent
            self._set("repetition_penalty", float(self.repetition_penalty))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be true or false")

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _bad("stop", text, "must be non-empty strings")
            if len(text) > MAX_STOP_CHARS:
                why = f"has {len(text)} characters: at most {MAX_STOP_CHARS} are allowed"
                raise _bad("stop", text, why)
            if not is_text(text):
                raise _bad("stop", text, "has a lone surrogate, which is no character: remove it")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, optional=False)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, optional=False)
            _number("logit_bias", bias, -100.0, 100.0, optional=False)
        # Each once; only now that none of them is a float or a bool, equal to an integer.
        self._set("stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken; call it on resolved parameters."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def plain_greedy(self) -> bool:
        """Whether the largest raw logit is the token and nothing else is asked for."""
        return (
            self.greedy
            and self.logprobs is None
            and self.repetition_penalty in (None, 1.0)
            and not (self.presence_penalty or self.frequency_penalty)
            and not (self.logit_bias or self.min_tokens)
        )

    def resolve_defaults(
        self, model_defaults: Mapping[str, Any], *, max_tokens: int = 16
    ) -> SamplingParams:
        """A copy without None: the request's value, else the model's, else OpenAI's.

        `model_defaults` is a `generation_config.json`; what it says of other things is ignored.
        `max_tokens` is the length if the model's defaults have no `max_new_tokens`; either
        grows to `min_tokens` when that is more.
        """
        values: dict[str, Any] = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        for name in values:
            given = model_defaults.get(name)
            if given is not None:
                values[name] = given
        if model_defaults.get("do_sample") is False:
            values["temperature"] = 0.0
        limit = model_defaults.get("max_new_tokens")
        _integer("max_new_tokens", limit, 1)
        values["max_tokens"] = max(max_tokens if limit is None else limit, self.min_tokens, 1)
        # Not `replace`: that would check the lists again, for each of many prompts.
        resolved = copy.copy(self)
        resolved._set("logit_bias", dict(self.logit_bias))
        for name, value in values.items():
            if getattr(self, name) is None:
                resolved._set(name, value)
        resolved._check_scalars()
        return resolved

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` when a token id named here is outside the vocabulary."""
        for name in ("stop_token_ids", "logit_bias"):
            largest = max(getattr(self, name), default=-1)
            if largest >= vocab_size:
                raise _bad(name, largest, f"is outside the vocabulary of {vocab_size}")

    @classmethod
    def names(cls) -> list[str]:
        """All parameter names."""
        return [f.name for f in fields(cls)]


def is_text(text: str) -> bool:
    """Whether every character of a string is one: half a surrogate pair can't be sent."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _bad(name: str, value: object, why: str) -> InvalidRequestError:
    try:
        shown = repr(value)
    except ValueError:  # too many digits for Python to write
        shown = f"a {type(value).__name__} too long to show"
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[:_MAX_SHOWN]}..."
    return InvalidRequestError(f"{name} = {shown} {why}", param=name)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"{name} = [{count} entries]: at most {most} are allowed", name)


def _items(name: str, value: object, most: int) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _bad(name, value, "must be a list")
    _check_count(name, len(value), most)
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)


def _integer(
    name: str, value: Any, low: int, high: int = MAX_INTEGER, *, optional: bool = True
) -> None:
    if value is None and optional:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and low <= value <= high:
        return
    kind = "" if is_integer else "an integer "
    is_above = is_integer and value > high
    bounds = f"from {low} to {high}" if high < MAX_INTEGER or is_above else f"at least {low}"
    raise _bad(name, value, f"must be {kind}{bounds}")


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    optional: bool = True,
    open_low: bool = False,
) -> None:
    if value is None and optional:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_number = is_number and _finite(value)
    if is_number and low <= value <= high and not (open_low and value == low):
        return
    kind = "" if is_number else "a finite number "
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    bounds += "" if math.isinf(high) else f" and at most {high:g}"
    raise _bad(name, value, f"must be {kind}{bounds}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
