"""Turning prompts and parameters into checked requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequestError, ModelNotFoundError
from minisgl.message import Submit
from minisgl.models import ModelInfo
from minisgl.params import MAX_INTEGER, is_text
from minisgl.tokenizer import Tokenizer
from minisgl.utils.logger import get_logger

__all__ = [
    "Params",
    "Prompt",
    "Prompts",
    "RequestBuilder",
    "as_prompt_list",
    "cache_salts",
    "load_tokenizer",
    "naming_prompt",
    "params_list",
    "priorities",
]

logger = get_logger(__name__)

Prompt = str | list[int]
Params = SamplingParams | SequenceOf[SamplingParams] | None
Prompts = str | SequenceOf[str] | SequenceOf[int] | SequenceOf[SequenceOf[int]]


def as_prompt_list(prompts: Prompts) -> list[Prompt]:
    """One text, one list of ids, or a list of either, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(
            f"prompts is a {type(prompts).__name__}: give a string, token ids, or a list of either",
            param="prompt",
        )
    if prompts and all(type(item) is int for item in prompts):
        return [list(prompts)]
    result = []
    for index, item in enumerate(prompts):
        with naming_prompt(index, len(prompts)):
            result.append(item if isinstance(item, str) else _ids(item))
    return result


def params_list(params: Params, count: int) -> list[SamplingParams]:
    """Sampling parameters of each of `count` prompts, from one for all or a list."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise InvalidRequestError(
            f"params is {params!r}: give a SamplingParams or a list of them", param="params"
        )
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts but {len(params)} sampling params")
    for index, one in enumerate(params):
        with naming_prompt(index, count):
            if not isinstance(one, SamplingParams):
                raise InvalidRequestError(f"params is {one!r}, not a SamplingParams", "params")
    return list(params)


def _per_prompt(
    name: str, value: Any, count: int, what: str, accepts: Callable[[Any], bool]
) -> list[Any]:
    """An option of each of `count` prompts, from one for all or a list with one for each."""
    several = isinstance(value, (list, tuple))
    values = list(value) if several else [value] * count
    if len(values) != count:
        raise InvalidRequestError(
            f"{name} has {len(values)} values for {count} prompts: give one for all, or a list "
            "with one for each",
            name,
        )
    for index, one in enumerate(values):
        if not accepts(one):
            with naming_prompt(index, count if several else 1):
                raise InvalidRequestError(f"{name} = {one!r} must be {what}", name)
    return values


def priorities(value: Any, count: int) -> list[int]:
    """The priority of each of `count` prompts."""
    what = "an integer of 64 bits"
    return _per_prompt(
        "priority",
        value,
        count,
        what,
        lambda x: type(x) is int and -MAX_INTEGER <= x <= MAX_INTEGER,
    )


def cache_salts(value: Any, count: int) -> list[str | None]:
    """The cache salt of each of `count` prompts."""
    what = "a string that is not empty, or None for no salt, and have no lone surrogate"
    return _per_prompt("cache_salt", value, count, what, _is_salt)


def _is_salt(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value != "" and is_text(value))


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Prefix a request's error with the index of its prompt when there are several."""
    try:
        yield
    except InvalidRequestError as error:
        if count > 1:
            error.args = (f"prompt {index}: {error.args[0]}", *error.args[1:])
        raise


def _ids(item: object) -> list[int]:
    if not isinstance(item, (list, tuple)):
        raise InvalidRequestError(
            f"a prompt is {item!r}: give a string or a list of token ids", param="prompt"
        )
    return list(item)


def load_tokenizer(path: str) -> Tokenizer | None:
    """The model's tokenizer; None, which is logged, if it has none: token ids work without."""
    try:
        return Tokenizer.load(path)
    except ModelNotFoundError as error:
        logger.warning("%s", error)
        return None


@dataclass(frozen=True)
class RequestBuilder:
    """Checks a prompt and its parameters against the model and makes the engine's requests."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    """Of all sources, those that the model can produce."""

    @classmethod
    def of(cls, info: ModelInfo, tokenizer: Tokenizer | None) -> RequestBuilder:
        """The builder for a model; EOS ids outside its vocabulary are said to be there, once."""
        eos, size = info.eos_token_ids, info.config.vocab_size
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos |= {tokenizer.eos_token_id}
        outside = sorted(token for token in eos if token >= size)
        if outside:
            logger.warning("EOS ids %s are outside the vocabulary of %d", outside, size)
        return cls(info, tokenizer, eos - set(outside))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked to be in the vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "the model has no tokenizer: give the prompt as token ids", param="prompt"
                )
            return self.tokens(self.tokenizer.encode(prompt))
        if not set(map(type, prompt)) <= {int}:
            raise self._no_token(next(token for token in prompt if type(token) is not int))
        return self.tokens(prompt)

    def tokens(self, token_ids: list[int]) -> list[int]:
        """Integers, of the tokenizer for instance, which may have tokens that the model lacks."""
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self.info.config.vocab_size:
                raise self._no_token(token)
        return token_ids

    def _no_token(self, token: Any) -> InvalidRequestError:
        size = self.info.config.vocab_size
        return InvalidRequestError(
            f"token id {token!r} is not in the vocabulary of {size}", "prompt"
        )

    def params(self, params: SamplingParams, default_max_tokens: int) -> SamplingParams:
        """Complete parameters, checked against the vocabulary and the tokenizer."""
        params.check_vocabulary(self.info.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, which this model lacks: use stop_token_ids",
                param="stop",
            )
        return params.resolve_defaults(self.info.generation_defaults, max_tokens=default_max_tokens)

    def submit(
        self,
        first_uid: int,
        token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Submit:
        """What the scheduler needs of a prompt; its `n` sequences get consecutive uids.

        `params` are complete. Without a seed in them one is drawn.
        """
        stop_ids = frozenset(params.stop_token_ids)
        return Submit(
            first_uid=first_uid,
            token_ids=token_ids,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_ids=sorted(stop_ids if params.ignore_eos else stop_ids | self.eos_ids),
            eos_ids=sorted(self.eos_ids),
            priority=priority,
            cache_salt=cache_salt,
        )
