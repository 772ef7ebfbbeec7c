"""What `/params` takes: `NAME=VALUE ...` as keyword arguments of `SamplingParams`."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from typing import Any

from minisgl.errors import InvalidRequestError
from minisgl.params import SamplingParams

__all__ = ["PARAM_NAMES", "parse_params"]

# One conversation is one sequence of text: these would be refused or have no effect.
_NOT_HERE = ("n", "logprobs", "prompt_logprobs")
PARAM_NAMES = [name for name in SamplingParams.names() if name not in _NOT_HERE]


def parse_params(text: str) -> dict[str, Any]:
    """`temperature=0.5 stop=["a", "b"]` as keyword arguments; SamplingParams checks them.

    Values are JSON, or else the text as it stands. A value ends where the next `name=` begins,
    so it may hold blanks.
    """
    changes: dict[str, Any] = {}
    for part in re.split(r"\s+(?=\w+\s*=)", text):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals:
            raise InvalidRequestError(f"{part!r} is not of the form NAME=VALUE")
        if name not in PARAM_NAMES:
            raise InvalidRequestError(f"no parameter {name!r} here, only {', '.join(PARAM_NAMES)}")
        changes[name] = _param_value(name, value)
    return changes


def _param_value(name: str, text: str) -> Any:
    if text.lower() in ("none", "null"):
        [item] = [item for item in fields(SamplingParams) if item.name == name]
        return item.default if item.default_factory is MISSING else item.default_factory()
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        value = text
    if name == "stop" and not isinstance(value, (list, str)):
        return text  # a number or `true` is a string to stop at
    if name == "stop_token_ids" and isinstance(value, int):
        return [value]
    if name == "logit_bias" and isinstance(value, dict):  # JSON has no integer keys
        return {int(k) if k.isdecimal() else k: bias for k, bias in value.items()}
    return value
