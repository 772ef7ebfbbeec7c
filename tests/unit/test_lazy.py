"""Names that packages export lazily: those that type checkers see, and none is imported early."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = ["minisgl", "minisgl.models", "minisgl.tokenizer", "minisgl.utils"]


@pytest.mark.parametrize("name", PACKAGES)
def test_names_are_those_that_type_checkers_see(name: str) -> None:
    package = import_module(name)
    tree = ast.parse(Path(str(package.__file__)).read_text("utf-8"))
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == package._EXPORTS
    assert set(package.__all__) == set(seen) <= set(dir(package))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_is_there_and_no_other(name: str) -> None:
    package = import_module(name)
    for export, module in package._EXPORTS.items():
        assert getattr(package, export) is getattr(import_module(f"{name}.{module}"), export)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_importing_the_packages_imports_nothing_heavy() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in done.stdout.split()}
    assert "minisgl" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "tokenizers", "jinja2", "rich"}
