"""The command line's arguments: every mistake is one line and exit code 2, and --help."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl.cli import main
from tests.model.command_line import refused, run

pytestmark = pytest.mark.usefixtures("demo_model_path")

GENERATE = ["generate", "hi", "--model", "smollm2"]
CHAT = ["chat", "--model", "smollm2"]
BENCH = ["bench", "offline"]


@pytest.mark.parametrize("command", [GENERATE, CHAT], ids=["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temperature", "3"], ["temperature", "3"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--temperature", "warm"], ["--temperature", "'warm'"]),
        (["--top-p", "0"], ["top_p", "0"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-k", "-2"], ["top_k", "-2"]),
        (["--min-p", "2"], ["min_p", "2"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--max-tokens", "1.5"], ["--max-tokens", "'1.5'"]),
        (["--max-tokens", "4", "--min-tokens", "5"], ["min_tokens", "5"]),
        (["--presence-penalty", "-2.5"], ["presence_penalty", "-2.5"]),
        (["--repetition-penalty", "0"], ["repetition_penalty", "0"]),
        (["--seed", str(2**63)], ["seed", str(2**63)]),
        (["--stop", ""], ["stop", "''"]),
        (["--stop-token-ids", "-1"], ["stop_token_ids", "-1"]),
        (["--n", "2"], ["--n"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_sampling_flags(
    command: list[str], flags: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [*command, *flags], *named)


@pytest.mark.parametrize("command", [GENERATE, CHAT, BENCH], ids=["generate", "chat", "bench"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--no-such-flag", "7"], ["--no-such-flag"]),
        (["--no\nsuch\nflag"], ["--no such flag"]),
        (["--max-tok", "7"], ["--max-tok"]),
        (["--page-size", "0"], ["--page-size", "0"]),
        (["--block-size", "x"], ["--page-size", "'x'"]),
        (["--num-pages", "-1"], ["--num-pages", "-1"]),
        (["--max-model-len", "0"], ["--max-model-len", "0"]),
        (["--tp", "2"], ["--tp", "2"]),
        (["--tp-size", "0"], ["--tp", "0"]),
        (["--memory-ratio", "1.5"], ["--memory-ratio", "1.5"]),
        (["--memory-ratio", "nan"], ["--memory-ratio", "nan"]),
        (["--threads", "0"], ["--threads", "0"]),
        (["--dtype", "int8"], ["--dtype", "'int8'"]),
        (["--device", "tpu"], ["--device", "'tpu'"]),
        (["--cache", "lru"], ["--cache", "'lru'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_engine_flags(
    command: list[str], flags: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [*command, *flags], *named)


@pytest.mark.parametrize("command", [GENERATE, CHAT], ids=["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--dtype", "float16", "--device", "cpu"], ["float16", "--dtype"]),
        (["--max-model-len", "8193"], ["8193", "8192"]),
        (
            ["--max-running-requests", "300", "--max-prefill-length", "200"],
            ["--max-running-requests 300", "--max-prefill-length 200"],
        ),
        (
            ["--max-num-seqs", "300", "--max-num-batched-tokens", "200"],
            ["--max-running-requests 300", "--max-prefill-length 200"],
        ),
        (["--model", "no-such-model"], ["'no-such-model'"]),
        (["--model", "/no/such/folder"], ["'/no/such/folder'"]),
        (["--model", ""], []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_this_model_or_machine_cannot_honour(
    command: list[str], flags: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, [*command, *flags], *named)


def write_text(path: Path) -> None:
    path.write_text("hello", encoding="utf-8")


def write_cut_gguf(path: Path) -> None:
    path.write_bytes(b"GGUF\x03\0\0\0")


@pytest.mark.parametrize("command", ["generate", "chat", "inspect"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("notes.gguf", write_text),
        ("cut.gguf", write_cut_gguf),
        ("empty-folder", Path.mkdir),
        ("missing.gguf", lambda path: None),
    ],
)
def test_paths_that_are_no_model(
    command: str,
    name: str,
    make: Callable[[Path], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    make(path)
    arguments = {"generate": ["hi", "--model"], "chat": ["--model"], "inspect": []}[command]
    refused(capsys, [command, *arguments, str(path)], name)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["inspect"], ["model"]),
        (["inspect", "no-such-model"], ["'no-such-model'"]),
        (["inspect", "smollm2", "--dtype", "int8"], ["'int8'"]),
        (["inspect", "smollm2", "extra"], ["extra"]),
        (["generate", "hi"], ["--model"]),
        (["chat"], ["--model"]),
        (["generate", "hi", "there", "--model", "smollm2"], ["there"]),
        (["generate", "", "--model", "smollm2"], ["empty"]),
        (["generate", "hi", "--model", "smollm2", "--file", "x"], ["--file"]),
        (["generate", "--model", "smollm2", "--file", "/no/such.txt"], ["/no/such.txt"]),
        (["generate", "--model", "smollm2", "--file", "/"], ["--file /"]),
        (["generate", "hi", "--model", "smollm2", "--raw", "--system", "x"], ["--system"]),
        (["bench", "offline", "--workload", "nap"], ["'nap'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_mistakes(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, arguments, *named)


def test_flags_without_a_command_serve(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in ((["--bogus"], "--model"), (["--model", "m", "--bogus"], "--bogus")):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("minisgl serve: error: ")
        assert named in said


def test_flags_before_the_command_are_not_taken_for_serving(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--debug", "inspect", "smollm2"]) == 2
    assert "minisgl inspect --debug" in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, minisgl.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["bogus"]], ids=str)
def test_no_command_or_an_unknown_one(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert line.startswith("minisgl: error: ")
    assert all(argument in line for argument in arguments)


def test_stdin_that_is_empty_or_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    refused(capsys, ["generate", "--model", "smollm2"], "empty")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    refused(capsys, ["generate", "--model", "smollm2"], "stdin is not UTF-8")


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture"
    file.write_bytes(b"\x89PNG\xff")
    refused(capsys, ["generate", "--model", "smollm2", "--file", str(file)], str(file))


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--temperature", "3", "--debug"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert "InvalidRequestError" in said
    assert said.splitlines()[-1].startswith("minisgl generate: error: temperature = 3.0")


def test_a_mistake_in_a_process_of_its_own() -> None:
    done = run("generate", "hi", "--model", "smollm2", "--top-p", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "minisgl generate: error: top_p = 0.0 must be above 0 and at most 1\n"


# -- help ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["generate", "chat", "inspect", "bench"])
def test_help_is_printed_and_exits_with_0(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"usage: minisgl {name}" in capsys.readouterr().out


def test_help_shows_groups_types_defaults_and_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "engine:",
        "sampling:",
        "--page-size INT",
        "(default: 16)",
        "--top-p FLOAT",
        "--max-num-seqs",
        "--gpu-memory-utilization",
        "--context-length",
    ):
        assert part in shown
