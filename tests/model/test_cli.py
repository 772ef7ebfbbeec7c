"""The command line on the demo model: what it prints, where, and how it exits.

Loading the model takes seconds, so few tests start a process that does; the others call `main`
in this process, and those that need a model share one.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minisgl.llm
from minisgl.cli import main
from minisgl.llm import LLM

ROOT = Path(__file__).resolve().parents[2]
FAST = ["--dtype", "float32", "--temperature", "0", "--num-pages", "16"]
STATS = re.compile(
    r"\[(\d+) prompt \+ (\d+) output tokens \| loaded in [\d.]+ s \| prefill \d+ tok/s \| "
    r"decode [\d.]+ tok/s\]\n"
)
LIMIT_S = 120

pytestmark = pytest.mark.usefixtures("demo_model_path")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "minisgl", *arguments]


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_S,
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ours, killed at the end or when it takes too long."""
    process = subprocess.Popen(
        command(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A test run in the background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    timer = threading.Timer(LIMIT_S, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", num_pages=16) as llm:
        yield llm


@pytest.fixture
def shared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Let commands in this process use the one model that is loaded."""
    monkeypatch.setattr(minisgl.llm, "LLM", lambda model, **config: contextlib.nullcontext(llm))
    return llm


# -- generate ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(llm: LLM) -> str:
    """What the model answers greedily to "Say hi" in eight tokens, by the offline interface."""
    from minisgl import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "Say hi"}]
    return llm.chat(messages, params, use_tqdm=False)[0].text


def test_generate_prints_the_text_alone_and_counts_on_stderr(expected: str) -> None:
    done = run("generate", "Say hi", "--model", "smollm2", "--max-tokens", "8", *FAST)
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    counts = STATS.fullmatch(done.stderr)
    assert counts, done.stderr
    assert int(counts[1]) > 8  # the template's own tokens and the message
    assert int(counts[2]) == 8


@pytest.mark.parametrize("where", ["stdin", "dash", "file"])
@pytest.mark.usefixtures("shared")
def test_generate_reads_the_prompt_from_elsewhere(
    where: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Say hi", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hi" if where != "file" else "not this"))
    source = {"stdin": [], "dash": ["-"], "file": ["--file", str(file)]}[where]
    assert main(["generate", *source, "--model", "smollm2", "--max-tokens", "8", *FAST]) == 0
    said = capsys.readouterr()
    assert said.out == expected + "\n"
    assert STATS.fullmatch(said.err), said.err


def test_generate_raw_continues_the_prompt_as_it_stands(
    shared: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    from minisgl import SamplingParams

    prompt = "The capital of France is"
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = shared.generate(prompt, params, use_tqdm=False)[0]
    arguments = ["--model", "smollm2", "--max-tokens", "4", *FAST]
    assert main(["generate", prompt, "--raw", *arguments]) == 0
    said = capsys.readouterr()
    assert said.out == expected.text + "\n"
    assert said.err.startswith(f"[{len(expected.prompt_token_ids)} prompt + 4 output tokens")


def test_ctrl_c_during_generate_exits_with_130() -> None:
    arguments = ["--model", "smollm2", "--max-tokens", "200", "--ignore-eos", *FAST]
    with started("generate", "Tell me a story", *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "minisgl generate: error: interrupted\n"


# -- chat ----------------------------------------------------------------------------------


def test_chat_answers_piped_lines_and_survives_ctrl_c() -> None:
    arguments = ["--model", "smollm2", *FAST]
    with started("chat", *arguments) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def send(*lines: str) -> None:
            process.stdin.write("".join(line + "\n" for line in lines))  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

        send("/params ignore_eos=true", "Tell me a long story")
        begun = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        send("/stats", "/reset", "/params max_tokens=8", "Say hi", "/stats", "/exit", "not read")
        rest, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    story, stopped, after = (begun + rest).partition("[stopped]\n")
    assert stopped and len(story) > 10
    numbers = [
        int(number)
        for number in re.findall(r"total +(\d+) prompt|\+ (\d+) output", after)
        for number in number
        if number
    ]
    last_of_first, total_prompt_1, total_of_first, last_of_second, total_prompt_2, total = numbers
    assert last_of_first == total_of_first
    assert last_of_second == 8
    assert total == total_of_first + 8
    assert total_prompt_2 > total_prompt_1
    assert after.count("conversation  ") == 2
    assert "[cut at max_tokens = 8]\n" in after


def chat(lines: list[str], *arguments: str) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", "--model", "smollm2", *FAST, *arguments]) == 0


def test_chat_equals_the_offline_interface(shared: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    from minisgl import SamplingParams

    chat(["Say hi", "And now bye"], "--max-tokens", "8", "--system", "You are a robot.")
    printed = capsys.readouterr().out.replace("[cut at max_tokens = 8]\n", "")
    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "system", "content": "You are a robot."}]
    answers = ""
    for text in ("Say hi", "And now bye"):
        messages.append({"role": "user", "content": text})
        answer = shared.chat(messages, params, use_tqdm=False)[0].text
        messages.append({"role": "assistant", "content": answer})
        answers += answer + "\n"
    assert printed == answers


def test_chat_goes_on_after_a_message_longer_than_the_context(
    shared: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(["word " * 400, "Say hi"], "--max-tokens", "3")
    refused, answer, *_ = capsys.readouterr().out.splitlines()
    assert refused.startswith("error: the prompt has 4")
    assert "256" in refused  # 16 pages of 16 tokens
    assert answer
    assert_nothing_lost(shared)


def assert_nothing_lost(llm: LLM) -> None:
    while llm.scheduler.has_work:  # the terminal update of an abort
        llm.scheduler.step()
    cache = llm.scheduler._cache
    assert cache.num_free_pages == cache.num_pages


# -- inspect -------------------------------------------------------------------------------

FACTS = {
    "architecture": "LlamaForCausalLM",
    "parameters": 134_515_008,
    "dtype": "bfloat16",
    "weight_bytes": 2 * 134_515_008,
    "layers": 30,
    "hidden_size": 576,
    "query_heads": 9,
    "kv_heads": 3,
    "head_size": 64,
    "vocabulary": 49_152,
    "tied_head": True,
    "context": 8_192,
    "kv_bytes_per_token": 2 * 30 * 3 * 64 * 2,  # K and V, layers, heads, head size, bytes
}


def test_inspect_prints_json(capsys: pytest.CaptureFixture[str], demo_model_path: Path) -> None:
    assert main(["inspect", "smollm2", "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert said.err == ""
    assert facts.items() >= FACTS.items()
    assert facts["path"] == str(demo_model_path)
    assert facts["weights_fit"] == (facts["weight_bytes"] < facts["available_bytes"])
    left = facts["available_bytes"] - facts["weight_bytes"]
    assert facts["kv_tokens_that_fit"] == max(0, left) // facts["kv_bytes_per_token"]
    assert facts["full_contexts_that_fit"] == facts["kv_tokens_that_fit"] // facts["context"]


def test_inspect_counts_with_the_type_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2", "--json", "--dtype", "float32"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weight_bytes"] == 2 * int(FACTS["weight_bytes"])
    assert facts["kv_bytes_per_token"] == 2 * int(FACTS["kv_bytes_per_token"])


def test_inspect_prints_aligned_lines() -> None:
    done = run("inspect", "smollm2")
    assert (done.returncode, done.stderr) == (0, "")
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert shown["parameters"] == "134,515,008"
    assert shown["kv bytes per token"] == "23,040"
    assert shown["architecture"] == "LlamaForCausalLM"


# -- mistakes ------------------------------------------------------------------------------

GENERATE = ["generate", "hi", "--model", "smollm2"]
CHAT = ["chat", "--model", "smollm2"]
BENCH = ["bench", "offline"]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *named: str) -> None:
    """`main` says what is wrong in one line with these words, and exits with 2."""
    try:
        code: Any = main(arguments)
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert code == 2, said.err
    assert said.out == ""
    assert said.err.endswith("\n")
    [line] = said.err.splitlines()
    assert re.match(rf"minisgl {arguments[0]}( offline)?: error: ", line), line
    for word in named:
        assert word in line


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
        (["--cache", "radix"], ["--cache", "'radix'"]),
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


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["--bogus"]], ids=str)
def test_no_command_or_an_unknown_one(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert line.startswith("minisgl: error: ")
    assert all(argument in line for argument in arguments[:1] if argument == "bogus")


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


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=["generate", "chat"])
def test_stop_ids_outside_the_vocabulary(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(
        capsys,
        [*command, "--model", "smollm2", "--stop-token-ids", "49152"],
        "stop_token_ids = 49152",
        "vocabulary of 49152",
    )


def test_prompts_that_do_not_fit_or_are_no_text(
    shared: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "smollm2", "--raw"]
    length = len(shared.tokenizer.encode("word " * 400))  # type: ignore[union-attr]
    refused(capsys, ["generate", "word " * 400, *arguments], f"has {length} tokens", "256")
    refused(capsys, ["generate", "bad \udcff byte", *arguments], "lone surrogate")
    assert_nothing_lost(shared)


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


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ["--model", "smollm2", "--max-tokens", "30", "--ignore-eos", *FAST]
    with started("generate", "Tell me a story", *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


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
