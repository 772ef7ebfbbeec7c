"""Dataclass fields that carry what a command-line flag needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

__all__ = ["option"]


def option(
    default: Any = None,
    help: str = "",
    *,
    aliases: Sequence[str] = (),
    choices: Sequence[str] = (),
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A dataclass field with its help text, further flag names and allowed values.

    `factory` makes a mutable default, in place of `default`.
    """
    metadata = {"help": help, "aliases": tuple(aliases), "choices": tuple(choices)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
