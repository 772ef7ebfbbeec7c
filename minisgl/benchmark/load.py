"""What `minisgl bench serve` sends: request bodies, all made before the clock runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minisgl.errors import ConfigError

from .serve_options import Range, ServeOptions

__all__ = ["Call", "measured_calls", "warm_up_calls"]

_TEXT = (
    "the of and to in is that for it was on are with as his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see"
)
WORDS = _TEXT.split()
"""Nearly all vocabularies have these, after a space, as one token."""

DEFAULT_REQUESTS = 200
# Streams of random numbers under one seed. Warm-up must not draw what is measured: it would be
# found in the prefix cache.
_MEASURED, _WARM_UP = 0, 1


class Call(NamedTuple):
    """One request to send."""

    body: bytes
    """JSON"""
    prompt_len: int | None
    """tokens of the prompt, if it was given as ids"""
    max_tokens: int


def measured_calls(options: ServeOptions, model: str) -> list[Call]:
    """The requests to measure; the same ones for the same options."""
    rng = np.random.default_rng([options.seed, _MEASURED])
    if options.dataset is not None:
        return _dataset(options, model, rng)
    as_ids = options.endpoint == "completions"
    return _random(options, model, rng, options.num_requests or DEFAULT_REQUESTS, as_ids)


def warm_up_calls(options: ServeOptions, model: str) -> list[Call]:
    """Requests like the measured ones, but no prompt or prefix of theirs.

    A data set may be meant for a vocabulary that `--vocab` doesn't fit: words go before it.
    """
    rng = np.random.default_rng([options.seed, _WARM_UP])
    as_ids = options.endpoint == "completions" and options.dataset is None
    return _random(options, model, rng, options.warmup, as_ids)


def _random(
    options: ServeOptions, model: str, rng: np.random.Generator, count: int, as_ids: bool
) -> list[Call]:
    symbols = options.vocab_range if as_ids else Range(0, len(WORDS) - 1)
    prefix = _draw(rng, symbols, options.shared_prefix_len)
    inputs = _draw(rng, options.input_range, count)
    outputs = _draw(rng, options.output_range, count)
    calls = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        numbers = prefix + _draw(rng, symbols, input_len)
        prompt = numbers if as_ids else " ".join(WORDS[number] for number in numbers)
        calls.append(_call(options, model, prompt, output_len))
    return calls


def _draw(rng: np.random.Generator, among: Range, count: int) -> list[int]:
    numbers: list[int] = rng.integers(among.low, among.high + 1, count).tolist()
    return numbers


def _dataset(options: ServeOptions, model: str, rng: np.random.Generator) -> list[Call]:
    assert options.dataset is not None
    calls = []
    with open(options.dataset, encoding="utf-8") as file:
        for where, row in islice(_rows(file, options.dataset), options.num_requests):
            prompt = _prompt(row, options.endpoint, where)
            [drawn] = _draw(rng, options.output_range, 1)
            max_tokens = drawn if row.get("max_tokens") is None else row["max_tokens"]
            if type(max_tokens) is not int or max_tokens < 1:
                raise ConfigError(f"{where}: max_tokens = {max_tokens!r} must be 1 or more")
            calls.append(_call(options, model, prompt, max_tokens))
    if len(calls) < (options.num_requests or 1):
        raise ConfigError(
            f"{options.dataset} has {len(calls)} requests, not the {options.num_requests or 1} "
            "of --num-requests (sent again, they would be found in the server's cache)"
        )
    return calls


def _rows(lines: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a file of JSON lines, and where it is for messages about it."""
    try:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: this line is no JSON object")
            yield where, row
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: this line is no JSON: {error.msg}") from None


def _prompt(row: dict[str, Any], endpoint: str, where: str) -> Any:
    """A row's prompt: text or ids for completions; text or messages for chat."""
    prompt, messages = row.get("prompt"), row.get("messages")
    if bool(prompt) == bool(messages):
        raise ConfigError(f"{where}: one of `prompt` and `messages` is needed, and not empty")
    if messages:
        if endpoint != "chat":
            raise ConfigError(f"{where}: `messages` need --endpoint chat")
        if not _is_list_of(dict, messages):
            raise ConfigError(f"{where}: `messages` must be a list of objects")
        return messages
    if not isinstance(prompt, str):
        if not _is_list_of(int, prompt):
            raise ConfigError(f"{where}: `prompt` must be text or a list of token ids")
        if endpoint == "chat":
            raise ConfigError(f"{where}: a `prompt` of token ids needs --endpoint completions")
    return prompt


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _call(options: ServeOptions, model: str, prompt: Any, max_tokens: int) -> Call:
    body = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.runs_past_eos:
        body["ignore_eos"] = True
    is_text = isinstance(prompt, str)
    if options.endpoint == "completions":
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}] if is_text else prompt
    prompt_len = len(prompt) if "prompt" in body and not is_text else None
    return Call(msgspec.json.encode(body), prompt_len, max_tokens)
