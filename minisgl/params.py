"""`SamplingParams`: how one request wants its tokens chosen, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import InvalidRequestError
from .utils.flags import option

__all__ = ["GREEDY_BELOW", "MAX_LOGPROBS", "MAX_N", "MAX_STOPS", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy: dividing by them would overflow."""
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 16


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
    stop_token_ids: Sequence[int] = option((), "token id that ends the text besides EOS")
    include_stop_str_in_output: bool = option(False, "keep the stop string in the text")
    ignore_eos: bool = option(False, "go on after an EOS id")
    min_tokens: int = option(0, "no EOS or stop id before this many tokens; at most max_tokens")
    logit_bias: Mapping[int, float] = option(
        factory=dict, help="added to the logits of these token ids, each in [-100, 100]"
    )
    logprobs: int | None = option(
        None, "return log-probabilities of each token and this many most likely, 0 to 20"
    )
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens, 0 to 20")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", tuple(_items("stop", stop)))
        ids = tuple(_items("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", ids)
        if not isinstance(self.logit_bias, Mapping):
            raise _bad("logit_bias", self.logit_bias, "must map token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check_scalars()
        self._check_lists()

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
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, optional=False)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be true or false")

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise _bad("stop", len(self.stop), f"has more than {MAX_STOPS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _bad("stop", text, "must be non-empty strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, optional=False)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, optional=False)
            _number("logit_bias", bias, -100.0, 100.0, optional=False)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken; call it on resolved parameters."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

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
        unset = {k: v for k, v in values.items() if getattr(self, k) is None}
        return replace(self, **unset)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` when a token id named here is outside the vocabulary."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise _bad(name, token, f"is outside the vocabulary of {vocab_size}")

    @classmethod
    def names(cls) -> list[str]:
        """All parameter names."""
        return [f.name for f in fields(cls)]


def _bad(name: str, value: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} = {value!r} {why}", param=name)


def _items(name: str, value: object) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _bad(name, value, "must be a list")
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)


def _integer(
    name: str, value: object, low: int, high: int | None = None, *, optional: bool = True
) -> None:
    if value is None and optional:
        return
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, f"must be an integer {bounds}")
    if value < low or (high is not None and value > high):
        raise _bad(name, value, f"must be {bounds}")


def _number(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    optional: bool = True,
    open_low: bool = False,
) -> None:
    if value is None and optional:
        return
    bounds = f"{'above' if open_low else 'at least'} {low:g}"
    bounds += "" if math.isinf(high) else f" and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
        raise _bad(name, value, f"must be a finite number {bounds}")
    if value < low or value > high or (open_low and value == low):
        raise _bad(name, value, f"must be {bounds}")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
