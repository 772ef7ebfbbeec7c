"""Every example runs with the files of its step alone, and the check that says so can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.steps import ROOT, STEPS, Step, check, main, step_files


def project(root: Path, files: dict[str, str]) -> Path:
    """A made-up project with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_table_and_examples_have_the_same_names() -> None:
    present = {file.name for file in (ROOT / "examples").glob("ch*.py")}
    assert {step.example for step in STEPS} == present
    assert len({step.example for step in STEPS}) == len(STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.example)
def test_example_runs_with_the_files_of_its_step(step: Step) -> None:
    outcome = check(step)
    assert outcome.passed, outcome.output


def test_a_step_may_use_the_files_of_those_before_it(tmp_path: Path) -> None:
    steps = (
        Step("ch1.py", ("minisgl/__init__.py",)),
        Step("ch2.py", ("minisgl/low/*.py",), ("data.txt", "word")),
    )
    ch2 = (
        "import sys; from minisgl.low.a import A; from minisgl import B\n"
        "print(A, B, open(sys.argv[1]).read(), sys.argv[2])\n"
    )
    files = {
        "minisgl/__init__.py": "B = 'bee'",
        "minisgl/low/a.py": "A = 'ay'",
        "data.txt": "data",
        "examples/ch1.py": "import minisgl",
        "examples/ch2.py": ch2,
    }
    root = project(tmp_path, files)
    assert step_files(steps[0], steps, root) == [Path("minisgl/__init__.py")]
    outcome = check(steps[1], steps, root)
    assert outcome.passed, outcome.output
    assert outcome.output == "ay bee data word\n"


def test_a_file_outside_the_step_is_missed(tmp_path: Path) -> None:
    # The real checkout has this module, and an editable install of it may be present.
    steps = (Step("ch1.py", ("minisgl/__init__.py",)),)
    files = {"minisgl/__init__.py": "", "examples/ch1.py": "import minisgl.core"}
    outcome = check(steps[0], steps, project(tmp_path, files))
    assert not outcome.passed
    assert "No module named 'minisgl.core'" in outcome.output


def test_modules_from_elsewhere_are_noticed(tmp_path: Path) -> None:
    sneaky = f"import sys, minisgl; minisgl.__path__.append({str(ROOT / 'minisgl')!r})\n"
    steps = (Step("ch1.py", ("minisgl/__init__.py",)),)
    files = {"minisgl/__init__.py": "", "examples/ch1.py": sneaky + "import minisgl.errors\n"}
    outcome = check(steps[0], steps, project(tmp_path, files))
    assert not outcome.passed
    assert "AssertionError: ('minisgl.errors'" in outcome.output


def test_failures_show_why(tmp_path: Path) -> None:
    steps = (Step("ch1.py", ("minisgl/__init__.py",)), Step("ch2.py", ("minisgl/gone/*.py",)))
    files = {
        "minisgl/__init__.py": "",
        "examples/ch1.py": "print('so far'); raise SystemExit('stopped')",
    }
    root = project(tmp_path, files)
    outcome = check(steps[0], steps, root)
    assert not outcome.passed
    assert "so far" in outcome.output
    assert "stopped" in outcome.output
    assert check(steps[1], steps, root).output == "ch2.py: nothing matches minisgl/gone/*.py\n"


def test_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steps.py", "check", "ch99_nothing"])
    assert main() == 2
    assert "no step is called 'ch99_nothing'" in capsys.readouterr().err
