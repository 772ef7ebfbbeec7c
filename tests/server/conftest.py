"""Servers that all tests of this tier share: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.serving import Server, make_tiny_model, start_server

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TINY_FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--num-pages", "256")
API_KEY = "a key of the tests"
TIMEOUT_S = 60


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random chat model that computes a token in a millisecond."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a context whose end takes seconds to reach."""
    return make_tiny_model(tmp_path_factory.mktemp("long"), context=4096)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: str) -> Iterator[Server]:
    """The tiny model, in float32: what a request gets does not depend on who runs beside it."""
    with start_server(tiny_model, *TINY_FLAGS, env=ONE_THREAD) as server:
        yield server
        assert server.stop() == 0, server.stderr


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Server]:
    """A real model, as it is served by default but for the size of its cache."""
    with start_server("smollm2", "--num-pages", "128") as server:
        yield server
        assert server.stop() == 0, server.stderr


@pytest.fixture(scope="session")
def guarded_server(long_model: str) -> Iterator[Server]:
    """With a key, small bodies only, and room for one sequence."""
    limits = ("--max-running-requests", "1", "--max-queued-requests", "0", "--max-n", "4")
    key = ("--api-key", API_KEY, "--max-body-size", "4096")
    with start_server(long_model, *TINY_FLAGS, *limits, *key, env=ONE_THREAD) as server:
        yield server
        assert server.stop() == 0, server.stderr


@pytest.fixture(scope="session")
def guarded(guarded_server: Server) -> Iterator[httpx.Client]:
    """A client of the guarded server that has its key."""
    key = {"authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=guarded_server.url, timeout=TIMEOUT_S, headers=key) as client:
        yield client


@pytest.fixture(scope="session")
def tiny(tiny_server: Server) -> Iterator[httpx.Client]:
    """A client of the tiny server, patient with a busy machine."""
    with httpx.Client(base_url=tiny_server.url, timeout=TIMEOUT_S) as client:
        yield client
