"""The layering of `minisgl/`: a module imports only from its own row and the rows above it.

The source is parsed, not run, so that imports inside functions and those "only for types" count
like any other: a lower layer that needs an upper one's type takes a protocol from `core` instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "minisgl"
MAX_LINES = 450

# Row 0 is the lowest layer. Users import names from the root, which hands them out lazily
# from the top; hence it counts as the last row, and no layer may import from it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("utils", "errors"),
    ("core", "config", "resolve", "params", "message", "distributed"),
    ("kernel",),
    ("layers",),
    ("models", "attention", "kvcache", "moe", "grammar"),
    ("engine",),
    ("scheduler",),
    ("tokenizer",),
    ("llm", "server", "ray", "shell", "simulate", "benchmark", "cli", "__init__", "__main__"),
)
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}


class Import(NamedTuple):
    """One import of a package or module directly under `minisgl`."""

    line: int
    target: str


def project_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def imports(source: str, path: Path) -> Iterator[Import]:
    """What the source of `path` (relative to the project's root) imports from `minisgl`."""
    for node in ast.walk(ast.parse(source, str(path))):
        for name in _imported_names(node, path):
            parts = name.split(".")
            if parts[0] != PACKAGE:
                continue
            # `from minisgl import LLM` names no module of the table: it asks the root.
            known = len(parts) > 1 and (parts[1] in ROW or len(parts) > 2)
            yield Import(node.lineno, parts[1] if known else "__init__")


def _imported_names(node: ast.AST, path: Path) -> list[str]:
    """Full dotted names that a node imports; empty when it is no import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = path.parent.parts[: len(path.parent.parts) - node.level + 1]
            base = ".".join([*package, *filter(None, [base])])
        # At the root, each name may be a module of its own; deeper, the base says it all.
        return [f"{base}.{a.name}" for a in node.names] if base == PACKAGE else [base]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def violations(source: str, path: Path) -> list[str]:
    """One message for each import of `path` that goes to a row below the importer's own."""
    owner = path.parts[1].removesuffix(".py")
    found = []
    for line, target in imports(source, path):
        for name in (owner, target):
            assert name in ROW, (
                f"{path}:{line}: {PACKAGE}.{name} has no row: add it to LAYERS in {__file__} "
                "and to the table of layers in docs/architecture.md"
            )
        if ROW[target] > ROW[owner]:
            found.append(
                f"{path}:{line}: {owner} (row {ROW[owner]}) imports {target} (row {ROW[target]})"
            )
    return found


def test_every_import_goes_to_its_own_row_or_above() -> None:
    found = []
    for file in project_files():
        found += violations(file.read_text("utf-8"), file.relative_to(ROOT))
    assert not found, "\n".join(found)


def test_every_package_and_module_has_a_row() -> None:
    present = {file.relative_to(ROOT).parts[1].removesuffix(".py") for file in project_files()}
    assert present, f"no modules found under {ROOT / PACKAGE}"
    unknown = sorted(present - set(ROW))
    assert not unknown, f"{unknown} have no row: add each to LAYERS in {__file__}"


def test_every_package_says_what_it_owns() -> None:
    for folder in {file.parent for file in project_files()}:
        init = folder / "__init__.py"
        assert init.exists(), f"{folder.relative_to(ROOT)} has no __init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text("utf-8")))
        assert docstring, f"{init.relative_to(ROOT)} has no docstring"


def test_files_stay_readable_in_one_sitting() -> None:
    lines = {f.relative_to(ROOT): len(f.read_text("utf-8").splitlines()) for f in project_files()}
    long = {str(file): count for file, count in lines.items() if count > MAX_LINES}
    assert not long, f"longer than {MAX_LINES} lines, split them: {long}"


@pytest.mark.parametrize(
    "source",
    [
        "import minisgl.engine",
        "import minisgl.engine.worker as w",
        "from minisgl.engine import Engine",
        "from minisgl import engine",
        "from ..engine import Engine",
        "from .. import engine",
        "def f():\n    from minisgl.engine.worker import Worker",
        "if TYPE_CHECKING:\n    from ..engine.worker import Worker",
        "importlib.import_module('minisgl.engine')",
        "from minisgl import LLM",
        "import minisgl",
    ],
)
def test_a_made_up_violation_is_found(source: str) -> None:
    found = violations(source, Path("minisgl/kvcache/pool.py"))
    assert len(found) == 1
    assert "kvcache (row 4) imports" in found[0]


@pytest.mark.parametrize(
    "source",
    [
        "import torch, os",
        "from minisgl.core import Batch",
        "from minisgl import errors",
        "from .. import core",
        "from . import radix",
        "from .radix import RadixTree",
        "from ..attention import base",
        "from minisglang import LLM",
        "name = 'minisgl.engine'",
    ],
)
def test_imports_from_above_and_beside_are_fine(source: str) -> None:
    assert violations(source, Path("minisgl/kvcache/pool.py")) == []


def test_an_unknown_package_is_named() -> None:
    with pytest.raises(AssertionError, match="minisgl.novel has no row: add it"):
        violations("from minisgl.novel.part import x", Path("minisgl/kvcache/pool.py"))
    with pytest.raises(AssertionError, match="minisgl.novel has no row: add it"):
        violations("from minisgl.core import x", Path("minisgl/novel.py"))
