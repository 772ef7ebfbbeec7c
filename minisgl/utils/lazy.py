"""Names that a package hands out without importing their modules before someone asks.

Imports nothing of the project: every package's `__init__.py` may use it, the root's too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package; `modules` maps each name to its submodule.

        if TYPE_CHECKING:
            from .gguf import read
        __getattr__, __dir__ = lazy_exports(__name__, {"read": "gguf"})

    Type checkers see the import, so a name belongs in both.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names
