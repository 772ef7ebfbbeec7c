"""`--tp 2`: answers are those of one rank, and no rank outlives or holds up the others."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.nodes import SOON_S, all_gone, free_address, node
from tests.server.answers import CHAT, COMPLETIONS, HELLO, events, ok
from tests.server.conftest import TINY_FLAGS
from tests.server.life import (
    GENERATE,
    IDLE,
    SCHEDULER,
    Client,
    Watched,
    endless,
    load,
    make_endless_model,
    watched,
)
from tests.server.serving import Server, wait_for

FOLLOWER = "minisgl.scheduler.follower"
RANKS = (*TINY_FLAGS, "--tp", "2", "--max-running-requests", "4")
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.3}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 30, "temperature": 0}),
    (CHAT, {"messages": HELLO, "max_tokens": 30, "n": 2, **SEEDED}),
    (COMPLETIONS, {"prompt": ["hello", "the quick"], "max_tokens": 20, "temperature": 0}),
    (COMPLETIONS, {"prompt": "a " * 60, "max_tokens": 20, "stop": ["e"], **SEEDED}),
    (GENERATE, {"text": "hello", "sampling_params": {"max_new_tokens": 20, "temperature": 0}}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_endless_model(tmp_path_factory.mktemp("endless"))


def texts(url: str) -> list[Any]:
    """What is generated for each of `REQUESTS`, without ids and times."""
    found = []
    for path, body in REQUESTS:
        answer = ok(httpx.post(url + path, json=body, timeout=60))
        if path == GENERATE:
            found.append(answer["text"])
        else:
            found.append([{**choice, "index": 0} for choice in answer["choices"]])
    return found


def test_answers_are_those_of_one_rank_until_sigterm(tiny_model: str, tiny_server: Server) -> None:
    flags = ("--shutdown-timeout", "0.5", "--log-format", "json", "--log-level", "info")
    with watched(tiny_model, *RANKS, *flags) as server:
        assert len(server.children(FOLLOWER)) == 1
        assert texts(server.url) == texts(tiny_server.url)
        server.server.process.send_signal(signal.SIGTERM)
        assert server.server.process.wait(SOON_S) == 0
        assert server.leaves_nothing(), server.left_behind()
        for line in server.server.stderr.splitlines():
            assert json.loads(line)["level"] in ("INFO", "WARNING"), line


@pytest.fixture(scope="module")
def busy(model: str) -> Iterator[Watched]:
    with watched(model, *RANKS) as server:
        yield server


def test_sequences_end_when_their_clients_vanish(busy: Watched) -> None:
    clients = [Client(busy.url, path) for path in (CHAT, COMPLETIONS, GENERATE)]
    for client in clients:
        client.first()
    clients[0].vanish()
    assert wait_for(lambda: load(busy.url)[:2] == (2, 0), SOON_S)
    assert clients[1].first().startswith("data: {")  # another one, by now
    for client in clients[1:]:
        client.vanish()
    assert wait_for(lambda: load(busy.url) == IDLE, SOON_S), load(busy.url)
    short = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = ok(httpx.post(busy.url + COMPLETIONS, json=short, timeout=60))
    assert answer["usage"]["completion_tokens"] == 5


def check_end(server: Watched, since: float, why: str) -> None:
    """The server ends by itself, soon, with a message and nothing left."""
    assert server.server.process.wait(SOON_S) == 1
    assert time.monotonic() - since < SOON_S
    logged = server.server.stderr
    assert why in logged, logged
    assert "Traceback" not in logged, logged
    assert server.leaves_nothing(), server.left_behind()


def test_everyone_hears_of_a_dead_rank_at_once(busy: Watched) -> None:
    """Uses the server up."""
    clients = [Client(busy.url, path) for path in (CHAT, COMPLETIONS)]
    for client in clients:
        client.first()
    whole = [Client(busy.url, path, endless(path, stream=False)) for path in (CHAT, GENERATE)]
    assert wait_for(lambda: load(busy.url)[:2] == (4, 0), SOON_S)
    whole.append(Client(busy.url))
    assert wait_for(lambda: load(busy.url)[:2] == (4, 1), SOON_S)
    victim, start = busy.child(FOLLOWER), time.monotonic()
    victim.kill()
    for client in clients:
        assert events(client.rest())[-1]["error"]["code"] == "engine_dead"
    for client in whole:
        assert client.response.status == 503
        assert client.error()["code"] == "engine_dead"
    check_end(busy, start, f"tensor-parallel rank 1 (pid {victim.pid}) was killed by SIGKILL")


@pytest.mark.parametrize(
    ("module", "why"),
    [(FOLLOWER, "rank 1 (pid {}) was killed"), (SCHEDULER, "worker (pid {}) was killed")],
)
def test_a_process_that_dies_while_nothing_runs(model: str, module: str, why: str) -> None:
    with watched(model, *RANKS) as server:
        victim, start = server.child(module), time.monotonic()
        victim.kill()
        check_end(server, start, why.format(victim.pid))


@pytest.mark.parametrize("end", ["SIGTERM", "a killed rank", "a killed server"])
def test_another_node_ends_with_the_server(model: str, end: str) -> None:
    address = free_address()
    place = ("--nnodes", "2", "--dist-init-addr", address)
    with (
        node(Path(model), address, (*RANKS, "--threads", "1")) as other,
        watched(model, *RANKS, *place) as server,
    ):
        theirs = other.ranks()
        if end == "SIGTERM":
            server.server.process.send_signal(signal.SIGTERM)
            assert server.server.process.wait(SOON_S) == other.ended() == 0
            assert "node 0 has closed" in other.log
        elif end == "a killed rank":
            theirs[0].kill()
            why = f"tensor-parallel rank 1 (pid {theirs[0].pid} on node 1) was killed by SIGKILL"
            check_end(server, time.monotonic(), why)
            assert other.ended() == 1 and f"minisgl serve: error: {why}" in other.log
        else:
            server.server.process.kill()
            assert other.ended() == 1 and "error: node 0 is gone" in other.log
        assert all_gone(theirs)
        assert server.leaves_nothing(), server.left_behind()


def test_a_stopped_rank_does_not_keep_the_server_from_ending(model: str) -> None:
    with watched(model, *RANKS, "--shutdown-timeout", "0.5") as server:
        client = Client(server.url)
        client.first()
        server.child(FOLLOWER).suspend()
        server.server.process.send_signal(signal.SIGTERM)
        assert "engine_dead" in client.rest()
        assert server.server.process.wait(2 * SOON_S) == 0
        assert server.leaves_nothing(), server.left_behind()


def test_ranks_that_heads_do_not_divide_by(model: str) -> None:
    with watched(model, "--tp", "3", ready=False) as server:
        assert server.server.process.wait(60) == 2
        assert "--tp 3: the model has 4 query heads" in server.server.stderr
        assert "2 KV heads" in server.server.stderr
