"""`Body`: a strict JSON object; what it does not know is refused by name, null is "not given"."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator

from minisgl.errors import InvalidRequestError

from ..errors import shorten

__all__ = ["Body", "Neutral"]


class Neutral(NamedTuple):
    """A parameter of others' that is taken only with the values that ask for nothing here."""

    feature: str
    """What other values would need."""
    values: tuple[Any, ...] = ()


def _same(given: Any, value: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but true is not 1."""
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)


def _complete_schema(schema: dict[str, Any], model: type[Body]) -> None:
    """Say in the JSON schema that null is "not given", and which neutral values are taken."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if name not in required and {"type": "null"} not in kinds:
            about = {k: field.pop(k) for k in ("title", "description", "default") if k in field}
            kinds = field.get("anyOf", [dict(field)])
            field.clear()
            field.update(about, anyOf=[*kinds, {"type": "null"}])
    for name, neutral in model.neutral.items():
        if neutral.values:
            schema["properties"][name] = {
                "enum": [*neutral.values, None],
                "description": "Accepted only with these values: this version has no "
                f"{neutral.feature}.",
            }


class Body(BaseModel):
    """Base of the request bodies, and of the objects in them."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra=_complete_schema,
    )

    neutral: ClassVar[Mapping[str, Neutral]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_known(cls, data: Any) -> Any:
        """Without nulls and neutral values; raises at the first parameter that is not known.

        At the first, and not by pydantic: a body of a million unknown names is a cheap attack
        if each of them gets an error of its own.
        """
        if not isinstance(data, dict):
            return data
        known = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.model_fields:
                known[name] = value
            elif name in cls.neutral:
                _check_neutral(name, value, cls.neutral[name])
            else:
                raise InvalidRequestError(cls._unknown(name), name[:100])
        return known

    @classmethod
    def _unknown(cls, name: str) -> str:
        close = difflib.get_close_matches(name[:100], cls.model_fields, n=1, cutoff=0.75)
        hint = f": did you mean {close[0]!r}?" if close else "; leave it out"
        return f"unknown parameter {shorten(name)}{hint}"


def _check_neutral(name: str, value: Any, neutral: Neutral) -> None:
    if any(_same(value, accepted) for accepted in neutral.values):
        return
    only = " or ".join(repr(accepted) for accepted in neutral.values)
    raise InvalidRequestError(
        f"{name} = {shorten(value)} is not supported: this version has no {neutral.feature}; "
        + (f"accepted: {only}" if only else "leave it out"),
        name,
    )
