"""Servers whose processes and files are watched, and clients that may vanish."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from tests.server.answers import CHAT, COMPLETIONS, HELLO
from tests.server.serving import Server, make_tiny_model, wait_for

GENERATE = "/generate"
CONTEXT = 1 << 16
"""Tokens. An answer of this length takes minutes: what ends sooner was ended."""
ENDLESS = {"max_tokens": CONTEXT, "ignore_eos": True, "temperature": 0}
LOOPING = (
    "{%- if 'loop' in messages[0].content -%}"
    "{%- for i in range(99999) -%}{%- for k in range(99999) -%}{%- endfor -%}{%- endfor -%}"
    "{%- endif -%}"
)
SCHEDULER = "minisgl.scheduler.worker"
TEXT_WORKER = "minisgl.server.text_worker"
RENDERER = "minisgl.tokenizer.render_worker"
TIMEOUT_S = 60


def make_endless_model(folder: Path) -> str:
    """The tiny model with a context whose end nobody sees, and a template that may loop."""
    path = make_tiny_model(folder, context=CONTEXT)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    config["chat_template"] = LOOPING + config["chat_template"]
    file.write_text(json.dumps(config), "utf-8")
    return path


def endless(path: str, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    """A request to an endpoint that goes on until somebody ends it."""
    if path == GENERATE:
        params = {"max_new_tokens": CONTEXT, "ignore_eos": True, "temperature": 0}
        return {"text": "hello", "sampling_params": params, "stream": stream, **more}
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    return {**prompt, **ENDLESS, "stream": stream, **more}


class Client:
    """One request on a connection of its own, sent at once and answered when it is asked for."""

    def __init__(self, url: str, path: str = COMPLETIONS, body: Any = None) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(
            address.hostname, address.port, timeout=TIMEOUT_S
        )
        data = json.dumps(endless(path) if body is None else body)
        self._connection.request("POST", path, data, {"Content-Type": "application/json"})
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """The head of the answer, for which this waits."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def first(self) -> str:
        """The first event of a stream."""
        assert self.response.status == 200, self.response.read()
        return self.response.readline().decode() + self.response.readline().decode()

    def rest(self) -> str:
        """All that is still to come, to the end of the answer."""
        return self.response.read().decode()

    def error(self) -> dict[str, Any]:
        """The error of an answer that is no stream."""
        error: dict[str, Any] = json.loads(self.rest())["error"]
        return error

    def vanish(self) -> None:
        """Break the connection off, as a client that crashes."""
        sock = self._connection.sock
        assert sock is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._response is not None:
            self._response.close()
        self._connection.close()


class Load(NamedTuple):
    """What `/metrics` says of the engine's load."""

    running: float
    waiting: float
    kv_usage: float


IDLE = Load(0, 0, 0)


def load(url: str) -> Load:
    """The load as it is now."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    values = {line.partition("{")[0]: value for line, value in lines.items()}
    return Load(*(float(values[f"minisgl:{name}"]) for name in names))


def _arguments(process: psutil.Process) -> list[str]:
    """Its command line; none if it has just ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


class Watched:
    """A server with a folder of its own for temporary files, and whom it started."""

    def __init__(self, server: Server, temporary: Path) -> None:
        self.server = server
        self.temporary = temporary
        self._seen: dict[int, psutil.Process] = {}

    @property
    def url(self) -> str:
        """Its address."""
        return self.server.url

    @property
    def sockets(self) -> Path:
        """The folder of its sockets."""
        (folder,) = self.temporary.glob("minisgl-*")
        return folder

    def children(self, module: str | None = None) -> list[psutil.Process]:
        """Its children, or those that run a module; remembered for `left_behind`."""
        try:
            found = psutil.Process(self.server.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        for child in found:
            self._seen.setdefault(child.pid, child)
        return [child for child in found if module is None or module in _arguments(child)]

    def child(self, module: str) -> psutil.Process:
        """The one child that runs a module."""
        (child,) = self.children(module)
        return child

    def left_behind(self) -> list[str]:
        """What is still there of a server that has ended."""
        processes = [str(process) for process in self._seen.values() if _lives(process)]
        return processes + [str(path) for path in self.temporary.iterdir()]

    def leaves_nothing(self, timeout_s: float = 10) -> bool:
        """Whether all of it goes, some of it perhaps a moment after the server."""
        return wait_for(lambda: not self.left_behind(), timeout_s)


def _lives(process: psutil.Process) -> bool:
    # An orphan that ended is a zombie until whoever adopted it looks after it.
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@contextmanager
def watched(
    model: str, *flags: str, env: Mapping[str, str] | None = None, ready: bool = True
) -> Iterator[Watched]:
    """A server with a thread; nothing of it is left after the block, however that ends."""
    # pytest's own folders have names too long for a socket.
    temporary = Path(tempfile.mkdtemp(prefix="srv-"))
    server = Server(
        model, *flags, env={"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), **(env or {})}
    )
    started = Watched(server, temporary)
    try:
        if ready:
            server.wait_until_ready()
            started.children()
        yield started
    finally:
        started.children()
        server.close()
        for process in started._seen.values():
            if _lives(process):
                os.kill(process.pid, 9)
        shutil.rmtree(temporary, ignore_errors=True)
