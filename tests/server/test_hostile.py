"""Clients and neighbours that mean harm: they are refused, and everyone else is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
import zmq

from tests.server.answers import CHAT, COMPLETIONS, HELLO, ok, refused
from tests.server.life import (
    GENERATE,
    IDLE,
    RENDERER,
    SCHEDULER,
    TIMEOUT_S,
    Client,
    Watched,
    load,
    make_endless_model,
    watched,
)
from tests.server.serving import wait_for

RUNNING, QUEUED = 8, 8
MIB = 1 << 20
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_endless_model(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Watched]:
    limits = ("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED))
    with watched(model, "--num-pages", "4096", *limits, "--template-timeout", "1") as started:
        yield started
        assert started.server.stop() == 0, started.server.stderr


@pytest.fixture
def http(server: Watched) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(autouse=True)
def goes_on(server: Watched, http: httpx.Client) -> Iterator[None]:
    """After every test, a chat is answered by the same processes."""
    before = server.child(SCHEDULER).pid
    yield
    ok(http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}))
    assert server.child(SCHEDULER).pid == before
    assert wait_for(lambda: load(server.url) == IDLE, 20)


@contextlib.contextmanager
def connection(url: str) -> Iterator[socket.socket]:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as sock:
        yield sock


class Answer(NamedTuple):
    status: int
    head: str
    body: str


def answer(sock: socket.socket) -> Answer | None:
    """What the server says until it closes the connection; None if that is nothing."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    head, _, body = data.decode().partition("\r\n\r\n")
    return Answer(int(head.split(" ")[1]), head, body) if head else None


# -- templates --------------------------------------------------------------------------------


def test_a_template_that_loops_is_stopped_while_others_are_served(
    server: Watched, http: httpx.Client
) -> None:
    loops = {"messages": [{"role": "user", "content": "loop"}]}
    results: list[httpx.Response] = []

    def loop() -> None:
        results.append(httpx.post(server.url + CHAT, json=loops, timeout=TIMEOUT_S))

    def used() -> dict[int, float]:
        """CPU time of each renderer, in seconds."""
        return {child.pid: child.cpu_times().user for child in server.children(RENDERER)}

    before = used()
    threads = [threading.Thread(target=loop) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: all(used()[pid] > before[pid] + 0.05 for pid in before), 20)
    served = 0
    while not results:  # the first of them has its second of CPU time
        ok(http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4}))
        ok(http.post("/tokenize", json={"prompt": "hello"}))
        served += 1
    assert served >= 5, "they had to wait"
    for thread in threads:
        thread.join()
    for result in results:
        message = refused(result, param="messages")
        assert "ran for more than 1 s" in message


def test_a_renderer_that_is_killed_is_replaced(server: Watched, http: httpx.Client) -> None:
    killed = server.children(RENDERER)
    for child in killed:
        child.kill()
    assert wait_for(lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in killed), 20)
    ok(http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}))


# -- requests that have no end ----------------------------------------------------------------


def flood(url: str, begin: bytes, piece: bytes) -> tuple[Answer | None, int]:
    """Send a piece again and again until the server hangs up; its answer, and the bytes sent."""
    with connection(url) as sock:
        sent = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(begin)
            while sent < 64 * MIB:
                sock.sendall(piece)
                sent += len(piece)
        return answer(sock), sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n", b"x: y\r\n" * 512),
        (b"GET /", b"a" * 4096),
        (b"GET /health?", b"a=b&" * 1024),
    ],
    ids=["one header", "many headers", "path", "query"],
)
def test_a_head_without_end_is_refused(server: Watched, begin: bytes, piece: bytes) -> None:
    answered, sent = flood(server.url, begin, piece)
    assert sent < 16 * MIB, "more than the kernel's buffers take"
    if answered is not None:  # hanging up on what is still being sent may lose the answer
        assert answered.status == 431
        error = json.loads(answered.body)["error"]
        assert error["code"] == "headers_too_large" and "65536 bytes" in error["message"]


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(b"", b"x: y\r\n" * 512), (b"x: ", b"x" * 4096)],
    ids=["many", "one"],
)
def test_trailers_without_end_are_cut_off(server: Watched, begin: bytes, piece: bytes) -> None:
    process = psutil.Process(server.server.process.pid)
    before = process.memory_info().rss
    answered, sent = flood(server.url, CHUNKED + b"2\r\n{}\r\n0\r\n" + begin, piece)
    assert sent < 16 * MIB
    assert answered is None or answered.status == 431
    assert process.memory_info().rss - before < 16 * MIB


def test_a_trailer_is_no_header(server: Watched) -> None:
    body = b'{"prompt": "hello", "max_tokens": 1}'
    chunks = b"%x\r\n%s\r\n" % (len(body), body)
    with connection(server.url) as sock:
        sock.sendall(CHUNKED + chunks + b"0\r\nx-request-id: smuggled\r\n\r\n")
        answered = answer(sock)
    assert answered is not None and answered.status == 200
    assert "smuggled" not in answered.head


def test_requests_that_never_end_keep_nobody_waiting(server: Watched, http: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        for index in range(100):
            sock = stack.enter_context(connection(server.url))
            sock.sendall(
                [
                    b"",
                    b"POST /v1/comp",
                    b"GET /health HTTP/1.1\r\nhost",
                    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 900\r\n\r\n{",
                ][index % 4]
            )
        ok(http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4}))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nhost: a\r\n\r\n",
        CHUNKED + b"no size\r\n",
    ],
    ids=["TLS", "zeros", "half a line", "no URL", "a chunk"],
)
def test_what_is_no_http_is_refused(server: Watched, garbage: bytes) -> None:
    with connection(server.url) as sock:
        sock.sendall(garbage)
        answered = answer(sock)
    assert answered is not None and answered.status == 400


# -- bodies -----------------------------------------------------------------------------------

LARGE = b'{"prompt": "' + b"a" * (17 * MIB) + b'"}'
JSON = {"content-type": "application/json"}


def test_a_body_that_is_too_large_is_refused(http: httpx.Client) -> None:
    message = refused(http.post(COMPLETIONS, content=LARGE, headers=JSON), 413)
    assert "16777216 bytes" in message and "--max-body-size" in message


def test_so_is_one_that_does_not_say_its_size(http: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        for start in range(0, len(LARGE), MIB):
            yield LARGE[start : start + MIB]

    refused(http.post(COMPLETIONS, content=parts(), headers=JSON), 413)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"],
    ids=["lists", "objects", "balanced"],
)
def test_deep_nesting_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "n": 10**9}),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}),
        (COMPLETIONS, {"prompt": "a", "best_of": 10**9}),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 128}),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 100_000}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 0 for i in range(100_000)}}),
        (GENERATE, {"text": "a", "sampling_params": {"n": 10**9}}),
    ],
    ids=["chat n", "n", "best_of", "prompts", "stops", "biases", "native n"],
)
def test_more_than_anyone_needs_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    refused(http.post(path, json=body))


# -- the sockets between the processes --------------------------------------------------------

PICKLE = pickle.dumps({"class": print, "text": "hello"})
GARBAGE = [
    b"",
    os.urandom(200),
    PICKLE,
    b"\x91" * 100_000,
    msgspec.msgpack.encode(["Submit", "not", "a", "prompt"]),
    msgspec.msgpack.encode({"type": "Abort"}),
]


def test_only_the_server_s_user_may_enter_the_sockets_folder(server: Watched) -> None:
    mode = server.sockets.stat()
    assert stat.S_IMODE(mode.st_mode) == 0o700
    assert mode.st_uid == os.getuid()
    names = {path.name for path in server.sockets.iterdir()}
    assert names == {"front", "scheduler"}


@pytest.mark.parametrize("name", ["front", "scheduler"])
def test_garbage_from_another_process_is_dropped(
    server: Watched, http: httpx.Client, name: str
) -> None:
    running = Client(server.url)
    running.first()
    with zmq.Context() as context, context.socket(zmq.PUSH) as pushing:
        pushing.connect(f"ipc://{server.sockets / name}")
        for garbage in GARBAGE:
            pushing.send(garbage)
        pushing.close(linger=TIMEOUT_S * 1000)
    ok(http.post(CHAT, json={"messages": HELLO, "max_tokens": 4}))
    dropped = f"Dropped {len(PICKLE)} bytes that are no message"
    assert wait_for(lambda: dropped in server.server.stderr, 20)
    assert running.first().startswith("data: {"), "the others go on"
    running.vanish()


# -- more than there is room for --------------------------------------------------------------


def at_once(count: int, ask: Callable[[httpx.AsyncClient], Any]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client) for _ in range(count)))

    return asyncio.run(main())


def test_what_the_queue_can_not_hold_is_told_to_come_again(server: Watched) -> None:
    body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    answers = at_once(200, lambda client: client.post(server.url + COMPLETIONS, json=body))
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) >= RUNNING + QUEUED
    assert len({ok(answer)["choices"][0]["text"] for answer in served}) == 1
    refusals = [answer for answer in answers if answer.status_code != 200]
    assert refusals, "there was room for all: the test shows nothing"
    for refusal in refusals:
        message = refused(refusal, 503, code="server_busy")
        assert "--max-queued-requests" in message
        assert int(refusal.headers["retry-after"]) >= 1
