"""How servers end: by signals in order, by a death at once, and nothing is left of them."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.answers import CHAT, COMPLETIONS, events, refused
from tests.server.life import (
    GENERATE,
    SCHEDULER,
    TEXT_WORKER,
    Client,
    Watched,
    endless,
    load,
    make_endless_model,
    watched,
)
from tests.server.serving import wait_for

SOON_S = 10
"""Five seconds are promised; a machine that tests share may take twice as long."""
DRAIN_S = 2
ROOM = ("--num-pages", "4096", "--max-running-requests", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_endless_model(tmp_path_factory.mktemp("endless"))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def status_of(url: str) -> int | None:
    """Of `/health`; None if nobody listens any more."""
    try:
        return httpx.get(f"{url}/health", timeout=SOON_S).status_code
    except httpx.TransportError:
        return None


def fill(server: Watched, *more: Client) -> list[Client]:
    """Four streams that run and two that wait, of every endpoint."""
    running = [Client(server.url, path) for path in (CHAT, COMPLETIONS, GENERATE, CHAT)]
    for client in running:
        assert client.first().startswith("data: {")
    waiting = [Client(server.url, path) for path in (CHAT, GENERATE)]
    count = 2 + len(more)
    assert wait_for(lambda: load(server.url)[:2] == (4, count), 20), load(server.url)
    return running + waiting


def ends_of(stream: str) -> list[str]:
    """The finish reasons in what came of a stream, which must be whole."""
    reasons = []
    for event in events(stream):
        choices = event.get("choices") or [event["meta_info"]]
        reason = choices[0]["finish_reason"]
        reasons += [reason["type"] if isinstance(reason, dict) else reason] if reason else []
    return reasons


# -- SIGTERM ----------------------------------------------------------------------------------


@dataclass
class Ended:
    """A busy server that was sent SIGTERM, as its clients and its files saw it."""

    exit_code: int
    seconds: float
    left: bool
    logged: str
    trace: str
    streams: list[str]
    whole: dict[str, Any]
    short: str
    refusals: dict[str, httpx.Response] = field(default_factory=dict)


@pytest.fixture(scope="module")
def ended(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """It may drain for two seconds; three of the four that run and all that wait would go on."""
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    logs = ("--log-format", "json", "--log-requests", "--log-interval", "0.2")
    drain = ("--shutdown-timeout", str(DRAIN_S), "--trace-file", str(trace))
    with watched(model, *ROOM, *logs, *drain) as server:
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port)) as stranger:
            stranger.sendall(b"what is this?\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 400 ")
        short = endless(COMPLETIONS, max_tokens=300)
        first = Client(server.url, COMPLETIONS, short)
        first.first()
        running = [Client(server.url, path) for path in (CHAT, COMPLETIONS, GENERATE)]
        for client in running:
            client.first()
        waiting = [Client(server.url, path) for path in (CHAT, COMPLETIONS, GENERATE)]
        whole = Client(server.url, CHAT, endless(CHAT, stream=False))
        assert wait_for(lambda: load(server.url).waiting >= 3, 20)
        start = time.monotonic()
        server.server.process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: status_of(server.url) == 503, DRAIN_S)
        refusals = {
            path: httpx.post(server.url + path, json=endless(path))
            for path in (CHAT, COMPLETIONS, GENERATE)
        }
        refusals["/health"] = httpx.get(server.url + "/health")
        texts = [client.rest() for client in (*running, *waiting)]
        result = Ended(
            exit_code=server.server.process.wait(SOON_S),
            seconds=time.monotonic() - start,
            left=not server.leaves_nothing(),
            logged=server.server.stderr,
            trace=trace.read_text("utf-8"),
            streams=texts,
            whole=json.loads(whole.rest()),
            short=first.rest(),
            refusals=refusals,
        )
        yield result


def test_sigterm_ends_the_server_in_time_and_leaves_nothing(ended: Ended) -> None:
    assert ended.exit_code == 0
    assert ended.seconds < DRAIN_S + SOON_S
    assert not ended.left


def test_live_streams_end_properly(ended: Ended) -> None:
    assert [ends_of(text) for text in ended.streams] == [["abort"]] * 6
    assert ended.whole["choices"][0]["finish_reason"] == "abort"


def test_what_ends_within_the_time_is_whole(ended: Ended) -> None:
    assert ends_of(ended.short) == ["length"]


def test_new_requests_are_refused_meanwhile(ended: Ended) -> None:
    for refusal in ended.refusals.values():
        message = refused(refusal, 503, code="server_busy")
        assert "shutting down" in message
        assert int(refusal.headers["retry-after"]) >= 1


def test_json_logs_are_json_line_by_line(ended: Ended) -> None:
    entries = [json.loads(line) for line in ended.logged.splitlines()]
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    assert {entry["level"] for entry in entries} <= {"INFO", "WARNING"}
    loggers = {entry["logger"] for entry in entries}
    assert "minisgl.scheduler.build" in loggers, "the children's too"
    assert any("num_running" in entry for entry in entries), "the load, every interval"


def test_every_request_has_one_line(ended: Ended) -> None:
    entries = [json.loads(line) for line in ended.logged.splitlines()]
    requests = [entry for entry in entries if "request_id" in entry]
    assert len({entry["request_id"] for entry in requests}) == len(requests) == 8
    ends = sorted(entry["finish_reasons"][0] for entry in requests)
    assert ends == ["abort"] * 7 + ["length"]
    (short,) = (entry for entry in requests if entry["finish_reasons"] == ["length"])
    assert short["output_tokens"] == 300 and short["ttft_ms"] > 0
    assert short["prompt_tokens"] > 0 and short["tokens_per_s"] > 0


def test_the_trace_has_steps_and_requests(ended: Ended) -> None:
    spans = [event for event in json.loads(ended.trace) if event["ph"] == "X"]
    steps = [span for span in spans if span["name"].startswith("step ")]
    assert len(steps) >= 300
    for span in steps:
        assert span["args"]["decode_tokens"] + span["args"]["prefill_tokens"] > 0
    numbers = [int(span["name"].removeprefix("step ")) for span in steps]
    assert numbers == list(range(1, len(steps) + 1))
    host = [span for span in spans if span["name"].split()[0] in ("plan", "launch", "read")]
    assert len(host) == 3 * len(steps)
    launches = {span["name"]: span for span in host}
    for span in steps:  # on a CPU, launching is computing
        launch = launches[span["name"].replace("step", "launch")]
        assert (launch["ts"], launch["dur"]) == (span["ts"], span["dur"])
    requests = [span for span in spans if "finish_reason" in span["args"]]
    assert len(requests) == 8
    (short,) = (span for span in requests if span["args"]["finish_reason"] == "length")
    assert short["args"]["output_tokens"] == 300
    parts = [s for s in spans if s["tid"] == short["tid"] and s["name"] == "decode"]
    assert any(short["ts"] < p["ts"] and p["dur"] < short["dur"] for p in parts)


# -- other ends in order ----------------------------------------------------------------------


def test_a_second_signal_hastens_the_end(model: str) -> None:
    with watched(model, *ROOM, "--shutdown-timeout", "600") as server:
        clients = fill(server)
        server.server.process.send_signal(signal.SIGINT)
        assert wait_for(lambda: status_of(server.url) == 503, SOON_S)
        clients[0].first()  # it goes on
        server.server.process.send_signal(signal.SIGINT)
        assert [ends_of(client.rest()) for client in clients] == [["abort"]] * 6
        assert server.server.process.wait(SOON_S) == 0
        assert server.leaves_nothing(), server.left_behind()


def test_a_signal_while_the_model_loads_ends_it_at_once(model: str) -> None:
    port = free_port()
    with watched(model, "--port", str(port), ready=False) as server:
        url = f"http://127.0.0.1:{port}"
        assert wait_for(lambda: status_of(url) == 503, 30), "503 while it loads"
        body = refused(httpx.post(url + CHAT, json=endless(CHAT)), 503, code="server_busy")
        assert "loading" in body
        server.children()
        server.server.process.send_signal(signal.SIGTERM)
        assert server.server.process.wait(SOON_S) == 0
        assert server.server.stdout == "", "it was not ready"
        assert "Traceback" not in server.server.stderr
        assert server.leaves_nothing(), server.left_behind()


@pytest.mark.slow
def test_a_scheduler_that_hangs_does_not_keep_the_server(model: str) -> None:
    with watched(model, *ROOM, "--shutdown-timeout", "0.5") as server:
        client = Client(server.url)
        client.first()
        server.child(SCHEDULER).suspend()
        server.server.process.send_signal(signal.SIGTERM)
        assert "engine_dead" in client.rest()
        assert server.server.process.wait(2 * SOON_S) == 0
        assert server.leaves_nothing(), server.left_behind()


# -- deaths -----------------------------------------------------------------------------------


def check_death(server: Watched, module: str, clients: list[Client], whole: list[Client]) -> None:
    """Kill a process: all requests get errors, and the server ends, at once."""
    victim = server.child(module)
    start = time.monotonic()
    victim.kill()
    for client in clients:
        *_, last = events(client.rest())
        assert last["error"]["code"] == "engine_dead", last
    for client in whole:
        assert client.response.status == 503
        assert client.error()["code"] == "engine_dead"
    health = status_of(server.url)
    assert health in (503, None)
    assert server.server.process.wait(SOON_S) == 1
    assert time.monotonic() - start < SOON_S
    assert f"(pid {victim.pid}) was killed by SIGKILL" in server.server.stderr
    assert "Traceback" not in server.server.stderr
    assert server.leaves_nothing(), server.left_behind()


def test_everyone_hears_of_a_dead_scheduler_at_once(model: str) -> None:
    with watched(model, *ROOM) as server:
        whole = [Client(server.url, path, endless(path, stream=False)) for path in (CHAT, GENERATE)]
        assert wait_for(lambda: load(server.url)[:2] == (2, 0), 20)
        clients = [Client(server.url, path) for path in (CHAT, COMPLETIONS)]
        for client in clients:
            client.first()
        whole += [Client(server.url, COMPLETIONS, endless(COMPLETIONS, stream=False))]
        queued = Client(server.url, CHAT)
        assert wait_for(lambda: load(server.url)[:2] == (4, 2), 20)
        # One that has not begun is no stream yet.
        check_death(server, SCHEDULER, clients, [*whole, queued])


def test_everyone_hears_of_a_dead_text_worker_at_once(model: str) -> None:
    flags = ("--tokenizer-workers", "1", "--template-timeout", "2")
    with watched(model, *ROOM, *flags) as server:
        clients = fill(server)
        looping = endless(CHAT, messages=[{"role": "user", "content": "loop"}])
        whole = [Client(server.url, CHAT, looping)]
        check_death(server, TEXT_WORKER, clients[:4], [*clients[4:], *whole])


def test_children_of_a_server_that_is_killed_end_by_themselves(model: str) -> None:
    with watched(model, *ROOM, "--tokenizer-workers", "1") as server:
        clients = fill(server)
        assert len(server.children()) >= 4, "scheduler, text worker, and its two renderers"
        server.server.process.kill()
        for client in clients:
            with pytest.raises((OSError, http.client.HTTPException)):
                client.rest()
        assert server.leaves_nothing(), server.left_behind()
