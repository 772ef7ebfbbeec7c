"""The workloads on llama.cpp's server, over HTTP: 32 slots, a connection for each request.

    python run_llamacpp.py --server .../llama-server --model MODEL.gguf

Its default is to keep each slot's last prompt and to share no prefix between slots.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peer import Job, arguments, report

_SLOTS = 32
_SLOT_TOKENS = 1152  # the longest sequence of a workload is 1,025


class Server:
    """A `llama-server` in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        said = subprocess.run([options.server, "--version"], capture_output=True, text=True)
        self.version = (said.stderr or said.stdout).splitlines()[0].removeprefix("version: ")
        self.weights = Path(options.model).name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        threads = str(options.threads)
        command = [options.server, "--model", options.model, "--port", str(self._port)]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(_SLOTS)]
        command += ["--ctx-size", str(_SLOTS * _SLOT_TOKENS)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        self._wait()

    def run(self, jobs: list[Job]) -> list[int]:
        """All requests at once."""
        with ThreadPoolExecutor(_SLOTS) as pool:
            return list(pool.map(self._complete, jobs))

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _complete(self, job: Job) -> int:
        body = {
            "prompt": job.prompt,
            "n_predict": job.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        count: int = self._ask("POST", "/completion", body)["tokens_predicted"]
        return count

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status != 200:
            raise ConnectionError(f"HTTP {response.status}: {answer[:300]!r}")
        return json.loads(answer)

    def _wait(self) -> None:
        """Return when the model is loaded: until then nobody listens, or /health says 503."""
        while True:
            try:
                self._ask("GET", "/health")
                return
            except ConnectionError:
                if self._process.poll() is not None:
                    raise SystemExit("llama-server ended: run it by hand to see why") from None
                time.sleep(0.01)


def main() -> None:
    """Measure."""
    parser = arguments("a .gguf file")
    parser.add_argument("--server", default="llama-server", help="the server's binary")
    options = parser.parse_args()
    report("llama.cpp", options, lambda: Server(options))


if __name__ == "__main__":
    main()
