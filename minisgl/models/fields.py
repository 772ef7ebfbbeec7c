"""Reading fields of a model's config: each value's type and range is checked where it is read.

A config comes from anywhere, and the code that uses it multiplies, divides and allocates by what
it says. Hence every reader returns a value that is sure to be of its type and within its bounds,
or raises `UnsupportedModelError` that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minisgl.errors import UnsupportedModelError

__all__ = ["MAX_SIZE", "Fields", "bad_field", "shown"]

MAX_SIZE = 2**31
"""No dimension, id or position is larger: 32 bits hold them all."""
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """The value as Python writes it, cut to a length that an error message can bear."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def bad_field(name: str, value: object, allowed: str) -> UnsupportedModelError:
    """The error for a field's value; `allowed` goes on after "must be"."""
    return UnsupportedModelError(f"The model's config: {name} = {shown(value)} must be {allowed}")


class Fields:
    """Typed access to an object's attributes or a mapping's items; null counts as absent.

    A `default` is checked like a given value, since it may be computed from other fields; without
    one the field must be there. `prefix` stands before the names in messages.
    """

    def __init__(self, source: Any, prefix: str = "") -> None:
        self._source = source
        self._prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, or `default` when it is absent or null."""
        if isinstance(self._source, Mapping):
            value = self._source.get(name)
        else:
            value = getattr(self._source, name, None)
        return default if value is None else value

    def name(self, name: str) -> str:
        """What messages call the field."""
        return self._prefix + name

    def _need(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise UnsupportedModelError(f"The model's config has no {self.name(name)!r}")
        return value

    def integer(
        self, name: str, low: int = 1, high: int = MAX_SIZE, *, default: int | None = None
    ) -> int:
        """A whole number from `low` to `high`."""
        value = self._need(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise bad_field(self.name(name), value, f"an integer from {low} to {high}")
        return value

    def number(
        self, name: str, low: float, high: float, *, default: float | None = None, ends: str = "[]"
    ) -> float:
        """A number from `low` to `high`; `ends` has "(" or ")" for an end that is left out."""
        value = self._need(name, default)
        allowed = f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}"
        number = _as_float(value)
        above = low < number if ends[0] == "(" else low <= number
        below = number < high if ends[1] == ")" else number <= high
        if not (above and below):  # comparisons with NaN are false
            raise bad_field(self.name(name), value, allowed)
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise bad_field(self.name(name), value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string that is not empty."""
        value = self._need(name, default)
        if not isinstance(value, str) or not value:
            raise bad_field(self.name(name), value, "a non-empty string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty by default."""
        value = self.get(name, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise bad_field(self.name(name), value, "a list of strings")
        return tuple(value)

    def integers(self, name: str, low: int = 0, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of whole numbers from `low` to `high`, empty by default."""
        value = self.get(name, ())
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in value
        ):
            raise bad_field(self.name(name), value, f"a list of integers from {low} to {high}")
        return tuple(value)

    def numbers(self, name: str, low: float, high: float) -> list[float]:
        """A list of numbers from `low` to `high`, which must be there."""
        value = self._need(name, None)
        numbers = [_as_float(v) for v in value] if isinstance(value, (list, tuple)) else [math.nan]
        if not all(low <= number <= high for number in numbers):
            allowed = f"a list of numbers from {low:g} to {high:g}"
            raise bad_field(self.name(name), value, allowed)
        return numbers

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object, empty by default."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise bad_field(self.name(name), value, "an object or null")
        return dict(value)


def _as_float(value: object) -> float:
    """A finite number as float, NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        return math.nan
    return number if math.isfinite(number) else math.nan
