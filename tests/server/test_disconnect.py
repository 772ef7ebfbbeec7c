"""Clients that go away: their sequences end, their pages come back, others go on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.answers import CHAT, COMPLETIONS
from tests.server.life import (
    GENERATE,
    IDLE,
    RENDERER,
    Client,
    Watched,
    endless,
    load,
    make_endless_model,
    watched,
)
from tests.server.serving import wait_for

ROOM = 16
"""Sequences that may run."""
SOON_S = 4
"""Two seconds are promised; a machine that tests share may take twice as long."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Watched]:
    flags = ("--num-pages", "4096", "--max-running-requests", str(ROOM))
    with watched(model, *flags, "--template-timeout", "1") as started:
        yield started
        assert started.server.stop() == 0, started.server.stderr


def becomes(url: str, running: int, waiting: int) -> bool:
    return wait_for(lambda: load(url)[:2] == (running, waiting), 20)


def gone_within(url: str) -> float:
    """Seconds until nothing runs, waits or holds a page."""
    start = time.monotonic()
    assert wait_for(lambda: load(url) == IDLE, SOON_S), load(url)
    return time.monotonic() - start


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_streams_end_when_their_clients_vanish(server: Watched, path: str) -> None:
    clients = [Client(server.url, path) for _ in range(ROOM)]
    for client in clients:
        assert client.first().startswith("data: {")
    busy = load(server.url)
    assert busy[:2] == (ROOM, 0) and busy.kv_usage > 0
    for client in clients:
        client.vanish()
    gone_within(server.url)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}),
        (CHAT, {"n": 2}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (GENERATE, {}),
        (GENERATE, {"text": ["a", "b"]}),
    ],
    ids=["chat", "chat of two", "completion", "two prompts", "native", "two native"],
)
def test_whole_answers_end_when_their_clients_vanish(
    server: Watched, path: str, more: dict[str, Any]
) -> None:
    body = endless(path, stream=False, **more)
    clients = [Client(server.url, path, body) for _ in range(8)]
    assert becomes(server.url, 16 if more else 8, 0)
    for client in clients:
        client.vanish()
    gone_within(server.url)


def test_those_in_the_queue_end_and_those_that_run_go_on(server: Watched) -> None:
    running = [Client(server.url, COMPLETIONS) for _ in range(ROOM)]
    for client in running:
        client.first()
    waiting = [Client(server.url, CHAT) for _ in range(4)]
    waiting.append(Client(server.url, COMPLETIONS, endless(COMPLETIONS, stream=False)))
    assert becomes(server.url, ROOM, 5)
    for client in waiting:
        client.vanish()
    assert wait_for(lambda: load(server.url)[:2] == (ROOM, 0), SOON_S)
    for client in running:
        assert client.first().startswith("data: {")  # another one, by now
        client.vanish()
    gone_within(server.url)


def test_a_place_that_a_client_leaves_is_taken(server: Watched) -> None:
    running = [Client(server.url) for _ in range(ROOM)]
    for client in running:
        client.first()
    waiting = [Client(server.url) for _ in range(4)]
    assert becomes(server.url, ROOM, 4)
    for client in running:
        client.vanish()
    for client in waiting:
        assert client.first().startswith("data: {")
    assert load(server.url)[:2] == (4, 0)
    for client in waiting:
        client.vanish()
    gone_within(server.url)


def test_a_client_that_leaves_during_its_template_submits_nothing(server: Watched) -> None:
    body = endless(CHAT, messages=[{"role": "user", "content": "loop"}])
    before = {child.pid for child in server.children(RENDERER)}
    client = Client(server.url, CHAT, body)
    busy = {child.pid: child.cpu_times().user for child in server.children(RENDERER)}
    assert wait_for(
        lambda: any(c.cpu_times().user > busy[c.pid] + 0.1 for c in server.children(RENDERER)), 20
    ), "the template was to loop"
    client.vanish()
    # The process is replaced when its time is over; nothing has run until then.
    assert wait_for(lambda: {child.pid for child in server.children(RENDERER)} != before, 20)
    assert load(server.url) == IDLE


def test_a_client_that_does_not_read_keeps_nobody_waiting(server: Watched) -> None:
    sleepers = [Client(server.url) for _ in range(4)]
    assert becomes(server.url, 4, 0)
    for _ in range(3):
        answer = httpx.post(
            f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 8}, timeout=20
        )
        assert answer.status_code == 200
    for client in sleepers:
        client.vanish()
    gone_within(server.url)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_sent_two_requests_ahead_is_missed_all_the_same(
    server: Watched, stream: bool
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(endless(COMPLETIONS, stream=stream)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request)
        assert becomes(server.url, 1, 0)
        client.sendall(request)
    gone_within(server.url)


def test_half_a_request_does_not_keep_a_server_from_ending(model: str) -> None:
    with watched(model, "--num-pages", "4096") as started:
        host, port = started.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            client.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
            assert load(started.url) == IDLE  # so it has read that
            started.server.process.terminate()
            assert client.recv(1) == b""
        assert started.server.process.wait(20) == 0
        assert "Traceback" not in started.server.stderr
