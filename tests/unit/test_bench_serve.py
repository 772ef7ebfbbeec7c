"""`minisgl bench serve` against a server, as a function and as a command.

The server is a stub with scripted streams.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from minisgl.benchmark import report, serve
from minisgl.benchmark.arrivals import Departure
from minisgl.benchmark.client import Client, Failure, Reply
from minisgl.benchmark.serve_options import ServeOptions, parse_goodput
from minisgl.cli import main
from minisgl.errors import ConfigError
from tests.unit.bench_replies import DONE, figured, sse, text, usage

KEY = "sk-secret"


# -- the stub server -----------------------------------------------------------------------


class Stub:
    """A server in a thread; each request gets what `answer` makes of its body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.models: Any = {"data": [{"id": "stub"}, {"id": "other"}]}
        self.models_status = 200
        self.answer: Any = self.as_asked
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._call(self._start())

    def as_asked(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """As many tokens as asked for, one a chunk."""
        count = body["max_tokens"]
        size = len(body.get("prompt") or body["messages"][0]["content"].split())
        chunks = [text("a", finish="length" if i == count - 1 else None) for i in range(count)]
        return 200, sse(*chunks, usage(size, count, cached=1)) + DONE

    def close(self) -> None:
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        status, content = self.answer(body)
        if content is None:  # an answer that never comes
            await asyncio.Event().wait()
        return web.Response(status=status, body=content)


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.close()


def bench(stub: Stub, **options: Any) -> dict[str, Any]:
    """The results of a small run without warm-up."""
    small = {"num_requests": 6, "input_len": "4:8", "output_len": "3", "warmup": 0}
    return serve.bench_serve(ServeOptions(url=stub.url, **{**small, **options})).results


# -- against a server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("completions", "/v1/completions"), ("chat", "/v1/chat/completions")],
)
def test_a_run_sends_what_it_counts(endpoint: str, path: str, stub: Stub) -> None:
    found = bench(stub, endpoint=endpoint, concurrency=2, api_key=KEY)
    assert (found["requests"], found["ok"], found["failed"]) == (6, 6, 0)
    assert (found["model"], found["endpoint"], found["url"]) == ("stub", endpoint, stub.url)
    assert set(stub.paths) == {path}
    assert len(stub.bodies) == 6
    assert {body["model"] for body in stub.bodies} == {"stub"}
    assert {headers["Authorization"] for headers in stub.headers} == {f"Bearer {KEY}"}
    prompts = [body.get("prompt") or body["messages"][0]["content"].split() for body in stub.bodies]
    assert found["input_tokens"] == sum(map(len, prompts))
    assert (found["output_tokens"], found["cached_tokens"]) == (18, 6)
    assert 1 <= found["peak_concurrency"] <= 2
    assert KEY not in json.dumps(found)


def test_the_warm_up_is_sent_and_not_counted(stub: Stub) -> None:
    assert bench(stub, warmup=3)["requests"] == 6
    assert len(stub.bodies) == 9


def test_the_key_of_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(stub, num_requests=1)
    monkeypatch.setenv("MINISGL_API_KEY", KEY)
    bench(stub, num_requests=1)
    assert "Authorization" not in stub.headers[0]
    assert stub.headers[1]["Authorization"] == f"Bearer {KEY}"


def test_a_model_that_is_named_needs_no_list(stub: Stub) -> None:
    stub.models, stub.models_status = {}, 404
    assert bench(stub, num_requests=1, model="mine")["model"] == "mine"
    with pytest.raises(ConfigError, match="names no model: set --model"):
        bench(stub)


def test_an_address_may_end_in_v1(stub: Stub) -> None:
    stub_url, stub.url = stub.url, stub.url + "/v1/"
    found = bench(stub, num_requests=1)
    assert (found["ok"], found["url"], stub.paths) == (1, stub_url, ["/v1/completions"])


def test_a_key_that_is_refused_is_told_at_once(stub: Stub) -> None:
    stub.models_status = 401
    with pytest.raises(ConfigError, match=r"refuses the key \(HTTP 401\): set --api-key"):
        bench(stub)
    assert stub.bodies == []


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (503, b'{"error": {"message": "queue\\nfull"}}', "queue full"),
        (500, b"<h1>sorry</h1>", "<h1>sorry</h1>"),
        (422, b'{"detail": "no"}', '{"detail": "no"}'),
        (204, b"", ""),
        (307, b"elsewhere", "elsewhere"),
    ],
)
def test_any_status_but_200_is_a_failure(
    status: int, content: bytes, message: str, stub: Stub
) -> None:
    stub.answer = lambda body: (status, content)
    [error] = bench(stub)["errors"]
    assert error == {"kind": f"HTTP {status}", "count": 6, "message": message}


def test_some_failures_leave_the_others_measured(stub: Stub) -> None:
    def every_other(body: dict[str, Any]) -> tuple[int, bytes]:
        if len(stub.bodies) % 2:
            return stub.as_asked(body)
        return 200, sse({"error": {"message": "worker died"}})

    stub.answer = every_other
    found = bench(stub, concurrency=1)
    assert (found["ok"], found["failed"], found["output_tokens"]) == (3, 3, 9)
    assert found["errors"] == [{"kind": "error in stream", "count": 3, "message": "worker died"}]


def test_a_request_that_never_ends_times_out(stub: Stub) -> None:
    stub.answer = lambda body: (200, None)
    [error] = bench(stub, num_requests=2, timeout=0.2)["errors"]
    assert (error["kind"], error["count"]) == ("timeout", 2)
    assert "0.2 s (--timeout)" in error["message"]


def test_the_client_notes_times_by_its_clock(stub: Stub) -> None:
    async def run() -> Reply:
        ticks = iter(range(100, 200))
        client = Client(
            stub.url, "completions", api_key=None, timeout_s=30, clock=lambda: float(next(ticks))
        )
        async with client:
            return await client.stream(b'{"max_tokens": 2, "prompt": [1]}')

    reply = asyncio.run(run())
    assert reply.failure is None
    assert (reply.sent_s, reply.first_s) == (100.0, 101.0)
    assert reply.end_s > 101.0


# -- the command ---------------------------------------------------------------------------


def command(stub: Stub, *flags: str) -> list[str]:
    small = ["--num-requests", "4", "--input-len", "4", "--output-len", "3", "--warmup", "1"]
    return ["bench", "serve", "--url", stub.url, *small, *flags]


def test_json_is_the_last_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(stub, "--json", "--goodput", "ttft:60000", "e2e:60000.5")) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (found["benchmark"], found["ok"], found["request_rate"]) == ("serve", 4, "inf")
    assert (found["input_len"], found["output_len"]) == ("4", "3")
    assert found["goodput"]["limits_ms"] == {"ttft": 60000, "e2e": 60000.5}
    assert found["goodput"]["share"] == 1.0
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(found[name]) == {"mean", "p50", "p90", "p99"}


def test_the_table_shows_what_was_measured(
    stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stub.models = {"data": [{"id": "[red]stub"}]}
    flags = ["--goodput", "ttft:60000", "--request-rate", "1000", "--concurrency", "4"]
    assert main(command(stub, *flags)) == 0
    shown = capsys.readouterr().out
    assert f"[red]stub at {stub.url}, completions; sent at 1000 a second, at most 4" in shown
    for row in (
        "requests ok +│ +4 of 4",
        r"input tokens +│ +16 \(4 cached\)",
        "output tokens +│ +12",
        "within ttft 60000 ms +│ +[0-9.,]+ requests/s, 100.0%",
        "TTFT +│( +[0-9.,]+ │){4}",
        "E2E +│( +[0-9.,]+ │){4}",
        "sent late by +│( +-?[0-9.,]+ │){4}",
    ):
        assert re.search(row, shown), (row, shown)


def test_the_table_shows_failures_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    failed = Reply(0.0, 1.0, failure=Failure("HTTP 503", "busy [/b] now"))
    asked = serve._asked(ServeOptions(), "m")
    report.print_serve_table({**asked, **figured([failed], cpu_s=1.0)})
    shown = capsys.readouterr().out
    assert "failed: 1 x HTTP 503: busy [/b] now" in shown
    assert "note: this client was busy 100%" in shown
    assert "TTFT" not in shown


def test_a_run_of_failures_only_exits_with_2(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answer = lambda body: (503, b'{"error": {"message": "full"}}')
    assert main(command(stub, "--json", "--warmup", "0")) == 2
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["failed"] == 4
    assert said.err == "minisgl bench serve: error: all requests failed: 4 x HTTP 503: full\n"


def test_a_warm_up_that_fails_ends_the_run(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answer = lambda body: (400, b'{"error": {"message": "prompt: unknown id"}}')
    assert main(command(stub)) == 2
    assert len(stub.bodies) == 1
    said = capsys.readouterr()
    assert "the warm-up's requests all failed: 1 x HTTP 400: prompt: unknown id" in said.err


def test_no_server_is_one_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    free = "http://127.0.0.1:1"  # no one listens below 1024 there but by intent
    assert main(["bench", "serve", "--url", free]) == 2
    said = capsys.readouterr()
    [line] = said.err.splitlines()
    assert (said.out, free in line, "minisgl serve" in line) == ("", True, True)


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")]
)
def test_plot(
    name: str, magic: bytes, stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(stub, "--plot", str(tmp_path / name))) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_plot_of_failures_only(stub: Stub, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from minisgl.benchmark.plot import save_plot

    failed = Departure(0.0, False, Reply(0.0, 1.0, failure=Failure("timeout", "late")))
    save_plot(str(tmp_path / "a.svg"), [failed], "title $\\frac$")
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_without_matplotlib_the_run_does_not_begin(
    stub: Stub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command(stub, "--plot", str(tmp_path / "a.png"))) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert stub.bodies == []


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "tpot:0.5"]) == {"ttft": 200.0, "tpot": 0.5}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--url", "localhost:1919"], ["--url", "'localhost:1919'"]),
        (["--endpoint", "embeddings"], ["--endpoint", "'embeddings'"]),
        (["--num-requests", "0"], ["--num-requests = 0"]),
        (["--concurrency", "0"], ["--concurrency = 0"]),
        (["--warmup", "-1"], ["--warmup = -1"]),
        (["--seed", "-1"], ["--seed = -1"]),
        (["--request-rate", "0"], ["--request-rate = 0"]),
        (["--request-rate", "nan"], ["--request-rate = nan"]),
        (["--input-len", "0"], ["--input-len = '0'"]),
        (["--input-len", ""], ["--input-len = ''"]),
        (["--input-len", "9:3"], ["--input-len = '9:3'", "LOW at most HIGH"]),
        (["--output-len", "1.5"], ["--output-len = '1.5'", "32:256"]),
        (["--vocab", "5:"], ["--vocab = '5:'"]),
        (["--vocab", "1:2", "--endpoint", "chat"], ["--vocab", "chat"]),
        (["--shared-prefix-len", "-3"], ["--shared-prefix-len = -3"]),
        (["--temperature", "inf"], ["--temperature = inf"]),
        (["--timeout", "0"], ["--timeout = 0"]),
        (["--dataset", "/no/such"], ["--dataset = '/no/such'"]),
        (["--dataset", __file__, "--input-len", "3"], ["--dataset", "--input-len"]),
        (["--goodput", "ttft"], ["--goodput = 'ttft'", "ttft:200"]),
        (["--goodput", "ttft:5", "itl:3"], ["--goodput = 'itl:3'"]),
        (["--goodput", "e2e:nan"], ["--goodput = 'e2e:nan'"]),
        (["--plot", "a.gif"], ["--plot = 'a.gif'", ".svg"]),
        (["--plot", "/no/such/a.png"], ["--plot", "'/no/such'"]),
        (["extra"], ["extra"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(
    flags: list[str],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the run has begun")

    monkeypatch.setattr(serve, "bench_serve", never)
    try:
        code: Any = main(["bench", "serve", *flags])
    except SystemExit as left:  # argparse
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = said.err.splitlines()
    assert line.startswith("minisgl bench serve: error: "), line
    for words in named:
        assert words in line
