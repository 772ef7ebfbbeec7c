"""The command line on the demo model: what it prints, where, and how it exits.

Loading the model takes seconds, so few tests start a process that does; the others call `main`
in this process, and those that need a model share one. What needs none, since the arguments are
refused before, is in `test_cli_arguments.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import minisgl.llm
from minisgl.cli import main
from minisgl.kernel.cpu import has_native
from minisgl.llm import LLM
from tests.model.command_line import FAST, refused, run, started

STATS = re.compile(
    r"\[(\d+) prompt \+ (\d+) output tokens \| loaded in [\d.]+ s \| prefill \d+ tok/s \| "
    r"decode [\d.]+ tok/s\]\n"
)

pytestmark = pytest.mark.usefixtures("demo_model_path")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", num_pages=16) as llm:
        yield llm


@pytest.fixture
def shared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Let commands in this process use the one model that is loaded."""
    monkeypatch.setattr(minisgl.llm, "LLM", lambda model, **config: contextlib.nullcontext(llm))
    return llm


def assert_nothing_lost(llm: LLM) -> None:
    while llm.scheduler.has_work:  # the terminal update of an abort
        llm.scheduler.step()
    cache = llm.scheduler._cache
    assert cache.num_available_pages == cache.num_pages


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


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ["--model", "smollm2", "--max-tokens", "30", "--ignore-eos", *FAST]
    with started("generate", "Tell me a story", *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


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


def test_chat_equals_the_offline_interface_and_leaves_no_process(
    shared: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minisgl import SamplingParams

    before = psutil.Process().children(recursive=True)
    lines = ["Say hi", "word " * 400, "And now bye"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    arguments = ["--max-tokens", "8", "--system", "You are a robot."]
    assert main(["chat", "--model", "smollm2", *FAST, *arguments]) == 0
    assert psutil.Process().children(recursive=True) == before
    printed = capsys.readouterr().out.replace("[cut at max_tokens = 8]\n", "")

    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "system", "content": "You are a robot."}]
    answers = []
    for text in (lines[0], lines[2]):
        messages.append({"role": "user", "content": text})
        answer = shared.chat(messages, params, use_tqdm=False)[0].text
        messages.append({"role": "assistant", "content": answer})
        answers.append(answer + "\n")
    assert printed.startswith(answers[0] + "error: the prompt has 4")
    refused = printed.removeprefix(answers[0]).removesuffix(answers[1])
    assert "longest sequence of 256" in refused  # 16 pages of 16 tokens
    assert refused.count("\n") == 1
    assert printed.endswith(answers[1])


# -- what the loaded model refuses ---------------------------------------------------------


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=["generate", "chat"])
def test_stop_ids_outside_the_vocabulary(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(
        capsys,
        [*command, "--model", "smollm2", "--stop-token-ids", "49152", *FAST],
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


SLOW_IMPORTS = (
    "transformers", "gguf", "safetensors", "huggingface_hub", "pydantic", "fastapi", "uvicorn",
    "yaml", "rich", "prompt_toolkit", "httpx", "matplotlib",
    "minisgl.server", "minisgl.shell", "minisgl.benchmark", "minisgl.tokenizer.renderer",
)  # fmt: skip


def test_generate_imports_nothing_that_the_first_token_does_not_need() -> None:
    """Which is to come within 2 s, most of them for importing torch."""
    has_native()  # compiles them if need be, which takes other modules
    code = """
        import sys
        from minisgl.cli import main
        arguments = ["generate", "Say hi", "--model", "smollm2", "--max-tokens", "1"]
        for flags in [], ["--dtype", "bfloat16"], ["--quantization", "int8"]:
            if main([*arguments, "--num-pages", "16", *flags]) != 0:
                sys.exit(1)
        print(*sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert {"torch", "tokenizers", "jinja2", "minisgl.engine"} <= set(loaded)
    assert [m for m in loaded if m.startswith(tuple(f"{name}." for name in SLOW_IMPORTS))] == []
    assert set(SLOW_IMPORTS).isdisjoint(loaded)


# -- inspect -------------------------------------------------------------------------------

NORMS = 61 * 576
VOCABULARY = 49_152 * 576
LINEARS = 134_515_008 - NORMS - VOCABULARY
HELD = {  # by what they are stored in; blocks of 32 take 34 bytes in Q8_0, 20 in Q4_1
    "none": 2 * (NORMS + VOCABULARY + LINEARS),
    "int8": 2 * NORMS + (VOCABULARY + LINEARS) // 32 * 34,
    "keep": 2 * NORMS + VOCABULARY // 32 * 34 + LINEARS // 32 * 20,
}
FACTS = {
    "architecture": "LlamaForCausalLM",
    "parameters": 134_515_008,
    "dtype": "bfloat16",
    "layers": 30,
    "hidden_size": 576,
    "query_heads": 9,
    "kv_heads": 3,
    "head_size": 64,
    "vocabulary": 49_152,
    "tied_head": True,
    "context": 8_192,
    "kv_dtype": "bfloat16",
    "kv_bytes_per_token": 2 * 30 * 3 * 64 * 2,  # K and V, layers, heads, head size, bytes
}


def test_inspect_prints_json(capsys: pytest.CaptureFixture[str], demo_model_path: Path) -> None:
    assert main(["inspect", "smollm2", "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert said.err == ""
    assert facts.items() >= FACTS.items()
    assert facts["quantization"] == ("keep" if has_native() else "none")
    assert facts["weight_bytes"] == HELD[facts["quantization"]]
    assert facts["path"] == str(demo_model_path)
    assert facts["weights_fit"] == (facts["weight_bytes"] < facts["available_bytes"])
    left = facts["available_bytes"] - facts["weight_bytes"]
    assert facts["kv_tokens_that_fit"] == max(0, left) // facts["kv_bytes_per_token"]
    assert facts["full_contexts_that_fit"] == facts["kv_tokens_that_fit"] // facts["context"]


def test_inspect_counts_with_the_type_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2", "--json", "--dtype", "float32"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weight_bytes"] == 2 * HELD["none"]
    assert facts["kv_bytes_per_token"] == 2 * int(FACTS["kv_bytes_per_token"])


@pytest.mark.parametrize(("quantization", "held"), [("int8", "int8"), ("int4", "keep")])
def test_inspect_counts_quantized_weights(
    quantization: str, held: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's blocks are those that int4 wants."""
    assert main(["inspect", "smollm2", "--json", "--quantization", quantization]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.items() >= FACTS.items()
    assert (facts["quantization"], facts["weight_bytes"]) == (quantization, HELD[held])


def test_inspect_counts_keys_and_values_of_8_bits_with_their_scales(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.kernel.cpu.has_native", lambda: True)
    assert main(["inspect", "smollm2", "--json", "--kv-dtype", "int8"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kv_dtype"], facts["kv_bytes_per_token"]) == ("int8", 2 * 30 * 3 * (64 + 4))
    monkeypatch.setattr("minisgl.kernel.cpu.has_native", lambda: False)
    assert main(["inspect", "smollm2", "--kv-dtype", "int8"]) == 2
    assert "needs the native CPU kernels" in capsys.readouterr().err


def test_inspect_prints_aligned_lines() -> None:
    done = run("inspect", "smollm2")
    assert (done.returncode, done.stderr) == (0, "")
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert shown["parameters"] == "134,515,008"
    assert shown["kv bytes per token"] == "23,040"
    assert shown["architecture"] == "LlamaForCausalLM"
