"""Finding a server for the chat: its address, its model, its key, and the command's flags."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from minisgl.cli import main
from minisgl.errors import ConfigError
from minisgl.shell.url_backend import UrlBackend, base_url
from tests.unit.chat_server import DONE, Stub, said
from tests.unit.scripted_chat import talk


@pytest.fixture
def stub() -> Iterator[Stub]:
    with closing(Stub()) as stub:
        yield stub


# -- models and keys -------------------------------------------------------------------------


def test_a_model_by_name_with_its_context_if_it_is_listed(stub: Stub) -> None:
    stub.models["data"].append({"id": "second", "max_model_len": 128})
    stub.answers = [[said("a", "stop"), DONE]]
    for name, length in (("first", 64), ("second", 128), ("alias", None)):
        with closing(UrlBackend(stub.url, name)) as backend:
            assert backend.context_len == length
    with closing(UrlBackend(stub.url, "alias")) as backend:
        talk(backend, "hi")
    assert stub.bodies[0]["model"] == "alias"


@pytest.mark.parametrize(
    ("models", "status", "named"),
    [
        ({"data": []}, 200, "lists no model"),
        (["what"], 200, "lists no model"),
        ({"error": {"message": "still loading"}}, 503, "HTTP 503: still loading"),
        ({"detail": "Not Found"}, 404, "HTTP 404: Not Found"),
        ({"error": {"message": "no key"}}, 401, "refuses the API key: set --api-key"),
    ],
)
def test_a_server_that_names_no_model(stub: Stub, models: Any, status: int, named: str) -> None:
    stub.models, stub.models_status = models, status
    with pytest.raises(ConfigError, match=named) as error:
        UrlBackend(stub.url)
    assert stub.url in str(error.value)


def test_a_model_is_asked_for_even_where_none_are_listed(stub: Stub) -> None:
    stub.models, stub.models_status = {"detail": "Not Found"}, 404
    stub.answers = [[said("a", "stop"), DONE]]
    with closing(UrlBackend(stub.url, "it")) as backend:
        assert talk(backend, "hi") == "a\n"


def test_the_key_is_sent_with_every_request(stub: Stub) -> None:
    stub.answers = [[said("a", "stop"), DONE]]
    with closing(UrlBackend(stub.url, api_key="sesame")) as backend:
        talk(backend, "hi")
    assert stub.keys == ["Bearer sesame"] * 2
    with pytest.raises(ConfigError, match="--api-key") as error:
        UrlBackend(stub.url, api_key="bad\nkey")
    assert "bad" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:1919", "http://127.0.0.1:1919"),
        ("localhost", "http://localhost"),
        ("http://host:80/", "http://host:80"),
        ("https://host/v1", "https://host"),
        ("host/v1/", "http://host"),
        ("https://host/behind/v1/", "https://host/behind"),
        ("[::1]:1919", "http://[::1]:1919"),
    ],
)
def test_addresses_as_users_write_them(given: str, meant: str) -> None:
    assert base_url(given) == meant


@pytest.mark.parametrize(
    "url",
    ["", "/", "http://", "ftp://host", "host:port", "host:0", "host:99999", "a b", "host/?a=1"]
    + ["http://user:key@host", "host#x", "http://[::1", "host\n", ":1919", "https:///v1"],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="must be like http://127.0.0.1:1919"):
        base_url(url)


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"no server answers at {url} .*minisgl serve"):
            UrlBackend(url)
    assert "loop" not in [thread.name for thread in threading.enumerate()]


# -- the command -----------------------------------------------------------------------------


def test_the_command_talks_to_a_server(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.answers = [[said("hello", "stop"), DONE]]
    monkeypatch.setenv("MINISGL_API_KEY", "from the environment")
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/exit\n"))
    url = stub.url.removeprefix("http://") + "/v1"
    assert main(["chat", "--url", url, "--top-k", "2", "--system", "S", "--model", "m"]) == 0
    assert capsys.readouterr() == ("hello\n", "")
    [body] = stub.bodies
    assert (body["model"], body["top_k"], len(body["messages"])) == ("m", 2, 2)
    assert stub.keys == ["Bearer from the environment"] * 2
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--url", url, "--api-key", "given"]) == 0
    assert stub.keys[2:] == ["Bearer given"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["--model", "--url"]),
        (["--model", "m", "--api-key", "k"], ["--api-key", "--url"]),
        (["--url", "u", "--num-pages", "3"], ["--num-pages = 3", "minisgl serve"]),
        (["--url", "u", "--model", "m", "--dtype", "float32"], ["--dtype = float32"]),
        (["--url", "u", "--top-p", "2"], ["top_p = 2"]),
        (["--url", "ftp://u"], ["'ftp://u'"]),
        (["--url", "127.0.0.1:1"], ["no server answers at http://127.0.0.1:1 "]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_one_line_and_exit_with_2(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert printed.out == ""
    assert line.startswith("minisgl chat: error: ")
    for word in named:
        assert word in line
