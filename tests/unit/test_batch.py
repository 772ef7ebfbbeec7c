"""Batches of lines over an engine that plays scripts: what is written, and what comes again."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ConfigError, EngineDeadError
from minisgl.server.batch import BatchRunner, OutputFile, Progress
from minisgl.server.batch.lines import InputLine, read_lines
from minisgl.server.openai import router
from tests.unit.batch_lines import CHAT, TEXT, Json, file_of, line, outcomes, written
from tests.unit.fake_async_engine import FakeAsyncEngine, answer, fake_context
from tests.unit.routes import Routes

HELLO = [{"role": "user", "content": "Hi"}]


class Batch:
    """Runs of one batch with one output."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "out.jsonl"
        self.engine = FakeAsyncEngine()
        self.progress: Progress

    async def run(
        self, lines: Sequence[Json | bytes], *, concurrency: int = 4, **config: Any
    ) -> None:
        context = fake_context(self.engine, **config)
        with OutputFile(str(self.path)) as output:
            output.resume()
            with Progress(None, len(output.done)) as self.progress:
                self.engine.observers[:] = [self.progress]
                runner = BatchRunner(context, output, self.progress)
                await runner.run(io.BytesIO(file_of(lines)), concurrency)

    def __call__(self, lines: Sequence[Json | bytes], **options: Any) -> dict[str | None, Any]:
        asyncio.run(self.run(lines, **options))
        return outcomes(self.path)


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


# -- what a line means -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (TEXT, {"prompt": "Hi", "model": "fake", "n": 2, "logprobs": 1}),
        (TEXT, {"prompt": ["a", "b"], "echo": True}),
        (CHAT, {"messages": HELLO, "max_tokens": 3}),
        (TEXT, {"prompt": "Hi", "max_tokens": 0}),
        (TEXT, {"prompt": "Hi", "max_tokns": 1}),
        (TEXT, {"prompt": "x" * 200}),
        (TEXT, {"prompt": "Hi", "model": "other"}),
        (TEXT, {"prompt": "Hi", "n": 9}),
        (CHAT, {}),
        (CHAT, {"messages": HELLO, "temperature": "hot"}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": 1}}),
    ],
)
def test_a_line_is_answered_as_the_same_request_over_http(
    batch: Batch, url: str, body: Json
) -> None:
    response = Routes(router, max_n=4).post(url, body)
    batch([line("a", body, url=url)], max_n=4)
    [found] = written(batch.path)
    assert found["custom_id"] == "a"
    assert found["error"] is None
    assert found["id"].startswith("batch_req_")
    answered = found["response"]
    assert answered["status_code"] == response.status_code
    assert answered["request_id"]
    expected = response.json()
    for name in {"id", "created"} & set(expected):
        assert type(answered["body"].pop(name)) is type(expected.pop(name))
    assert answered["body"] == expected


def test_a_stream_is_refused(batch: Batch) -> None:
    assert batch([line("a", {"prompt": "Hi", "stream": True}), line("b")]) == {"a": 400, "b": 200}
    first = next(item for item in written(batch.path) if item["custom_id"] == "a")
    assert first["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("bad", "custom_id", "code", "named"),
    [
        (b"{not json", None, "invalid_json", "line 2: it is not valid JSON"),
        (b'{"custom_id": "x", "body": NaN}', None, "invalid_json", "line 2"),
        (b"\xff\xfe", None, "invalid_json", "line 2"),
        (b"[" * 70 + b"]" * 70, None, "invalid_json", "64 deep"),
        (b"[1]", None, "invalid_line", "line 2: [1] must be a JSON object"),
        (line(None), None, "invalid_custom_id", "custom_id is required"),
        (line(""), None, "invalid_custom_id", "custom_id = ''"),
        (line(7), None, "invalid_custom_id", "custom_id = 7"),
        (line("good"), None, "duplicate_custom_id", "custom_id = 'good'"),
        (line("good", url="/x"), None, "duplicate_custom_id", "custom_id = 'good'"),
        (line("x", method=None), "x", "invalid_method", "method is required"),
        (line("x", method="GET"), "x", "invalid_method", "method = 'GET' must be 'POST'"),
        (line("x", url="/v1/embeddings"), "x", "invalid_url", "'/v1/embeddings'"),
        (line("x", body="Hi"), "x", "invalid_body", "body = 'Hi' must be a JSON object"),
        ({**line("x"), "body": None}, "x", "invalid_body", "JSON body is required"),
        (line("x", bdy={}), "x", "invalid_line", "did you mean 'body'"),
    ],
)
def test_a_line_that_is_no_request_is_refused_and_the_others_go_on(
    batch: Batch, bad: Json | bytes, custom_id: str | None, code: str, named: str
) -> None:
    assert batch([line("good"), bad, line("last")]) == {"good": 200, custom_id: code, "last": 200}
    [refused] = [item for item in written(batch.path) if item["error"]]
    assert refused["error"]["message"].startswith("line 2: ")
    assert named in refused["error"]["message"]
    assert (batch.progress.num_done, batch.progress.num_failed) == (2, 1)


def test_a_line_that_is_too_long_is_refused_and_the_others_go_on(batch: Batch) -> None:
    long = line("long", {"prompt": "x" * (3 << 20)})  # several reads
    assert batch([line("a"), long, line("b")], max_body_size=500) == {
        "a": 200,
        None: "line_too_long",
        "b": 200,
    }


def test_a_request_that_the_engine_fails_on_does_not_stop_the_others(batch: Batch) -> None:
    def script(ids: list[int], choice: int) -> list[Any]:
        return answer("no", "error" if bytes(ids[1:]) == b"bad" else "length")

    batch.engine = FakeAsyncEngine(script)
    assert batch([line("a"), line("b", {"prompt": "bad"}), line("c")]) == {
        "a": 200,
        "b": 500,
        "c": 200,
    }


def test_what_was_not_expected_reveals_nothing(batch: Batch) -> None:
    batch.engine.submit_error = ZeroDivisionError("/secret/path")
    assert batch([line("a")]) == {"a": 500}
    assert b"secret" not in batch.path.read_bytes()


# -- running -----------------------------------------------------------------------------------


def test_as_many_lines_run_at_a_time_as_asked_for(batch: Batch) -> None:
    most = 0

    def script(ids: list[int], choice: int) -> list[Any]:
        nonlocal most
        most = max(most, batch.engine.num_live + 1)
        return answer("Hello")

    batch.engine = FakeAsyncEngine(script)
    names = [f"r{i}" for i in range(50)]
    assert batch([line(name) for name in names], concurrency=3) == dict.fromkeys(names, 200)
    assert most == 3


def test_the_input_is_read_as_it_is_needed() -> None:
    class Source(io.BytesIO):
        num_read = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.num_read += 1
            return super().read(10)

    source = Source(b"1234567\n" * 100)

    async def first() -> InputLine:
        lines = read_lines(source, 100)
        found = await anext(lines)
        await lines.aclose()
        return found

    assert asyncio.run(first()) == InputLine(1, b"1234567")
    assert source.num_read == 1


def test_blank_lines_are_no_requests_and_the_last_needs_no_end() -> None:
    async def lines(data: bytes) -> list[InputLine]:
        return [found async for found in read_lines(io.BytesIO(data), 100)]

    assert asyncio.run(lines(b"")) == []
    assert asyncio.run(lines(b"\na\r\n  \nb")) == [InputLine(2, b"a\r"), InputLine(4, b"b")]


def test_cancelling_aborts_what_runs_and_keeps_what_was_written(batch: Batch) -> None:
    async def cancelled() -> None:
        batch.engine = FakeAsyncEngine(
            lambda ids, choice: answer("Hello" if len(ids) == 2 else "Hi"), manual=True
        )
        lines = [line("short", {"prompt": "long"}), line("long", {"prompt": "x"}), line("later")]
        running = asyncio.ensure_future(batch.run(lines, concurrency=2))
        while len(batch.engine.submitted) < 2:
            await asyncio.sleep(0)
        batch.engine.step(3)
        while batch.progress.num_done < 1 or len(batch.engine.submitted) < 3:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert outcomes(batch.path) == {"short": 200}
    assert len(batch.engine.aborted) == 2
    assert batch.engine.num_live == 0


def test_an_engine_that_dies_ends_the_batch_and_fails_no_line(batch: Batch) -> None:
    async def dying() -> None:
        batch.engine = FakeAsyncEngine(manual=True)
        running = asyncio.ensure_future(batch.run([line("a"), line("b"), line("c")], concurrency=2))
        while len(batch.engine.submitted) < 2:
            await asyncio.sleep(0)
        batch.engine.die()
        with pytest.raises(EngineDeadError):
            await running

    asyncio.run(dying())
    assert written(batch.path) == []


def test_an_output_that_cannot_be_written_ends_the_batch(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: OutputFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OutputFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        batch([line("a"), line("b")])


def test_the_summary_counts_lines_and_tokens(batch: Batch) -> None:
    batch([line("a", {"prompt": ["Hi", "Ho"], "n": 2}), line("b", {"prompt": ""})])
    # <|begin|> and two bytes a prompt; "Hello 0" and its end a choice
    assert batch.progress.summary().startswith("[1 done, 1 failed | 6 prompt + 32 output tokens | ")
    batch([line("a"), line("c")])
    assert batch.progress.summary().startswith("[1 done, 0 failed, 1 done before | 3 prompt + 8 ")


# -- resuming ----------------------------------------------------------------------------------


def test_lines_that_succeeded_are_kept_and_failed_ones_are_tried_again(batch: Batch) -> None:
    lines = [line("a"), line("b"), b"{", line("c", url="/x"), line("d", {"prompt": ""})]
    failed = {None: "invalid_json", "c": "invalid_url", "d": 400}
    assert batch(lines) == {"a": 200, "b": 200, **failed}
    kept = batch.path.read_bytes().splitlines()[-2:]  # refused at once: the others finish later
    assert batch(lines) == {"a": 200, "b": 200, **failed}
    assert batch.path.read_bytes().splitlines()[:2] == kept
    assert len(batch.engine.submitted) == 2
    assert batch([*lines[:2], line("c"), line("d")]) == dict.fromkeys("abcd", 200)
    assert len(batch.engine.submitted) == 4


def test_a_duplicate_of_a_line_that_was_done_before_is_still_refused(batch: Batch) -> None:
    for _ in range(2):
        assert batch([line("a"), line("a")]) == {"a": 200, None: "duplicate_custom_id"}
    assert len(batch.engine.submitted) == 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_line_that_was_torn_comes_again_wherever_it_was_cut(batch: Batch, failed: bool) -> None:
    lines = [line("a", {"prompt": ""} if failed else None), line("b")]
    first = batch(lines)
    whole = batch.path.read_bytes()
    begin = whole.index(b"\n") + 1
    for end in [*range(begin, begin + 40), len(whole) - 2, len(whole) - 1]:
        batch.path.write_bytes(whole[:end])
        assert batch(lines) == first


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_the_only_line_may_be_torn(batch: Batch, cut: int) -> None:
    batch([line("a")])
    batch.path.write_bytes(batch.path.read_bytes()[:cut])
    assert batch([line("a")]) == {"a": 200}


def test_a_last_line_that_only_lacks_its_end_counts_as_torn(batch: Batch) -> None:
    batch([line("a")])
    batch.path.write_text(json.dumps(written(batch.path)[0]), "utf-8")  # as an editor leaves it
    assert batch([line("a")]) == {"a": 200}


def test_failed_lines_stay_until_a_run_begins(batch: Batch) -> None:
    batch([line("a", {"prompt": ""})])
    before = batch.path.read_bytes()
    OutputFile(str(batch.path)).close()
    assert batch.path.read_bytes() == before


def test_a_rewritten_output_keeps_its_mode_and_its_link(batch: Batch) -> None:
    batch([line("a", {"prompt": ""})])
    target = batch.path.rename(batch.path.with_name("elsewhere"))
    target.chmod(0o640)
    batch.path.symlink_to(target)
    assert batch([line("a")]) == {"a": 200}
    assert batch.path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(batch.path.parent.iterdir()) == sorted([batch.path, target])


@pytest.mark.parametrize(
    "content", [b"notes", b"notes\n", b"{}\n", b'{"custom_id": "a", "body": {}}\n', b"\n\n", b"1"]
)
def test_a_file_that_no_batch_wrote_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes\.txt: its line 1 is no line of a batch's output"):
        OutputFile(str(path))
    assert path.read_bytes() == content


def test_outputs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        OutputFile(str(tmp_path / "none" / "out"))
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path), "/dev/null", str(tmp_path / "pipe")):
        with pytest.raises(ConfigError, match="is no regular file"):
            OutputFile(path)


def test_two_batches_cannot_write_to_one_output(batch: Batch) -> None:
    batch([line("a", {"prompt": ""})])
    name = str(batch.path)
    with OutputFile(name) as first:
        with pytest.raises(ConfigError, match="another batch is writing to it"):
            OutputFile(name)
        first.resume()  # replaces the file
        with pytest.raises(ConfigError, match="another batch is writing to it"):
            OutputFile(name)
    OutputFile(name).close()
