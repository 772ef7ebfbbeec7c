"""A table from names to things, whose failed look-up says which names there are."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["Registry"]


class Registry(Generic[T]):
    """Named entries of one kind.

    >>> colours: Registry[int] = Registry("colour")
    >>> colours.register("red", 1)
    >>> colours["red"]
    1
    """

    def __init__(self, kind: str, error: type[Exception] = KeyError) -> None:
        self.kind = kind
        self._error = error
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Add an entry; a name can be taken once."""
        if name in self._entries:
            raise KeyError(f"{self.kind} {name!r} is registered already")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            known = ", ".join(sorted(self._entries))
            raise self._error(f"Unknown {self.kind} {name!r}; supported: {known}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Registered names in the order of registration."""
        return list(self._entries)
