"""What the front adds to a first token: HTTP, template, tokenizer, processes, detokenizer.

    python benchmark/front.py [--model smollm2] [--requests 100] [--tokenizer-workers 0]

Starts a server, sends chat requests one after another to it while it is idle, and takes from each
time to first token what the engine itself needed for it: from the request's start in the scheduler
to its first token, by the server's trace. What is left is the front's, with what a plain client of
the standard library takes itself. The last line is JSON, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

from minisgl.benchmark.timing import percentiles

WARM_UP = 5


def first_token_s(connection: HTTPConnection, name: str, text: str) -> float:
    """Seconds until the first event of a streamed answer."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "x-request-id": name}
    data = json.dumps(body)
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", data, headers)
    response = connection.getresponse()
    event = response.readline()
    seconds = time.perf_counter() - start
    if not event.startswith(b"data: {"):
        sys.exit(f"{response.status}: {event + response.read()!r}")
    response.read()
    return seconds


def measure(url: str, count: int) -> dict[str, float]:
    """Time to first token of `count` requests in turn, by request id, in seconds."""
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return {
        f"front-{i}": first_token_s(
            connection, f"front-{i}", f"{i}: what is {i} times {i + 1}, and why is that so?"
        )
        for i in range(count)
    }


def engine_s(trace: Path) -> dict[str, float]:
    """Seconds from start to first token in the engine, by request id."""
    found, current = {}, ""
    for event in json.loads(trace.read_text("utf-8")):
        if event["ph"] == "X" and "finish_reason" in event["args"]:
            current = event["name"]
        elif event["name"] == "prefill":
            found[current] = event["dur"] / 1e6
    return found


def main() -> None:
    """Serve, ask, compare."""
    parser = argparse.ArgumentParser(description="What the front adds to a first token.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokenizer-workers", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "minisgl", "serve", "--model", arguments.model]
        command += ["--port", "0", "--trace-file", str(trace), "--log-level", "error"]
        command += ["--tokenizer-workers", str(arguments.tokenizer_workers)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        line = server.stdout.readline()
        if "ready at" not in line:
            sys.exit("the server did not start")
        url = line.split("ready at ")[1].split(";")[0]
        try:
            total = measure(url, WARM_UP + arguments.requests)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        engine = engine_s(trace)
    names = [f"front-{i}" for i in range(WARM_UP, WARM_UP + arguments.requests)]
    figures = {
        "ttft_ms": [total[name] * 1000 for name in names],
        "engine_ms": [engine[name] * 1000 for name in names],
        "front_ms": [(total[name] - engine[name]) * 1000 for name in names],
    }
    print(json.dumps({"cpus": os.cpu_count()} | {k: percentiles(v) for k, v in figures.items()}))


if __name__ == "__main__":
    main()
