"""`minisgl batch` as a command: its files, its streams, its exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.model.command_line import refused, run, started
from tests.server.serving import wait_for

FLAGS = ("--dtype", "float32", "--num-pages", "64", "--served-model-name", "tiny")
FILES = ("--model", "smollm2", "--input", "/no/such.jsonl", "--output", "/no/such.out")
START_S = 90


def request(custom_id: str, **body: object) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(fields) + "\n"


def outcomes(path: Path) -> dict[str, int | None]:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {line["custom_id"]: (line["response"] or {}).get("status_code") for line in lines}


def test_a_batch_is_interrupted_and_goes_on(tiny_model: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ["--model", tiny_model, "--output", str(output), *FLAGS]
    first = request("a", prompt="Hi", model="tiny", max_tokens=3)
    with started("batch", "--input", "-", *arguments) as process:
        assert process.stdin is not None
        process.stdin.write(first)
        process.stdin.flush()
        # stdin stays open: the command waits for more, and answers what there is
        assert wait_for(lambda: output.exists() and bool(output.read_bytes()), START_S)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        *_, counts, said = process.stderr.read().splitlines()
        assert process.wait() == 130
    assert counts.startswith("[1 done, 0 failed | ")
    assert said == "minisgl batch: interrupted; the same command goes on from here"
    kept = output.read_text("utf-8")

    source = tmp_path / "in.jsonl"
    source.write_text(first + request("b", prompt="Hi", model="other"), "utf-8")
    done = run("batch", "--input", str(source), *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("[0 done, 1 failed, 1 done before | ")
    assert output.read_text("utf-8").startswith(kept)
    assert outcomes(output) == {"a": 200, "b": 404}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["--model"]),
        (["--model", "smollm2", "--input", "x"], ["--output"]),
        ([*FILES, "--concurrency", "0"], ["--concurrency = 0", "1"]),
        ([*FILES, "--concurrency", "many"], ["--concurrency", "'many'"]),
        ([*FILES, "--max-n", "0"], ["--max-n = 0"]),
        ([*FILES, "--port", "80"], ["--port"]),
        ([*FILES], ["--input /no/such.jsonl"]),
    ],
)
def test_bad_arguments(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["batch", *arguments], *named)


def test_a_model_that_is_none_leaves_the_output_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(request("a"), "utf-8")
    failed = '{"id":"batch_req_1","custom_id":"a","response":null,"error":{"code":"x"}}\n'
    output.write_text(failed, "utf-8")
    files = ["--input", str(source), "--output", str(output)]
    refused(capsys, ["batch", "--model", "/no/such/folder", *files], "/no/such/folder")
    assert output.read_text("utf-8") == failed
