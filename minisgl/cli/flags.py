"""Command-line flags from dataclass fields, and dataclasses from parsed flags."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn, TypeVar

__all__ = ["Parser", "add_flags", "from_flags"]

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, full flag names only, and defaults in the help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse, but the command itself refuses what it doesn't know.

        Left to the outermost parser, the error would send users to the help of that one.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


class _Formatter(argparse.HelpFormatter):
    """Shows each flag's default, unless its help speaks of it or it has none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = (None, False, (), argparse.SUPPRESS)
        shown = not any(action.default is value for value in silent)  # 0 is a default to show
        if "default" not in text and shown:
            text += " (default: %(default)s)"
        return text


def add_flags(
    parser: argparse.ArgumentParser, cls: type, title: str, *, skip: Sequence[str] = ()
) -> None:
    """Add a flag for each field of a dataclass, in a group of their own.

    `max_model_len` becomes `--max-model-len`; lists are given by repeating the flag; fields
    that hold mappings have no flag.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        kind, many = _kind(hints[item.name])
        if kind is None or item.name in skip:
            continue
        names = ["--" + item.name.replace("_", "-"), *item.metadata["aliases"]]
        group.add_argument(*names, dest=item.name, **_argument(item, kind, many))


def from_flags(cls: type[T], arguments: argparse.Namespace) -> T:
    """The dataclass with the values of the flags that were added for it."""
    names = [item.name for item in fields(cls) if item.name in arguments]  # type: ignore[arg-type]
    return cls(**{name: getattr(arguments, name) for name in names})


def _argument(item: Field[Any], kind: type, many: bool) -> dict[str, Any]:
    common: dict[str, Any] = {"help": item.metadata["help"], "default": item.default}
    if kind is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    if many:  # left out, the field's own default stands: argparse would append to it
        default = argparse.SUPPRESS
        return {**common, "type": kind, "action": "append", "default": default, "metavar": "X"}
    if item.metadata["choices"]:
        return {**common, "type": kind, "choices": item.metadata["choices"]}
    return {**common, "type": kind, "metavar": kind.__name__.upper()}


def _kind(hint: Any) -> tuple[type | None, bool]:
    """(scalar type, whether it is a list) of an annotation; (None, ...) when no flag fits."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        [hint] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    origin = typing.get_origin(hint)
    if origin is not None and issubclass(origin, Mapping):
        return None, False
    if origin is not None:
        return typing.get_args(hint)[0], True
    return hint, False
