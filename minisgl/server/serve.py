"""`serve`: the life of a server, from its first socket to its exit code.

listen ─> load (503) ─> ready ─> SIGTERM or SIGINT ─> drain (503 to new ones) ─> exit 0
             |            └────> a process died: its requests get errors ──────> exit 1
             └─> it can't start: its message ──────────────────────────────────> raised
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import uvloop

from minisgl.config import EngineConfig
from minisgl.utils.logger import get_logger
from minisgl.utils.mp import freeze_heap

from .app import CountRequests, make_app
from .async_engine import AsyncEngine
from .config import API_KEY_VARIABLE, ServerConfig
from .context import ServerContext, ServerState
from .http import HttpServer, listen
from .logs import RequestLogger, StatsLogger
from .metrics import Metrics
from .trace import TraceWriter

__all__ = ["serve"]

logger = get_logger(__name__)

_ABORT_S = 5.0
"""An abort takes until the end of a step. One that takes longer may never end."""


def serve(model: str, config: EngineConfig, options: ServerConfig) -> int:
    """Serve `model` until a signal ends it; returns the exit code: 0, or 1 if the engine died.

    Raises `ConfigError` or another `MinisglError` if it can't start.
    """
    with listen(options.host, options.port) as sock:
        return uvloop.run(_Server(model, config, options, sock).run())


class _Server:
    def __init__(
        self, model: str, config: EngineConfig, options: ServerConfig, sock: socket.socket
    ) -> None:
        self._options = options
        self._sock = sock
        self._config = config
        self._model = model
        self._state = ServerState()
        self._stop = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> int:
        options = self._options
        # A file that can't be written is known before the model is loaded.
        trace = TraceWriter(options.trace_file) if options.trace_file is not None else None
        try:
            return await self._serve(trace)
        finally:
            if trace is not None:
                trace.close()

    async def _serve(self, trace: TraceWriter | None) -> int:
        options = self._options
        engine = AsyncEngine(
            self._model,
            tokenizer_workers=options.tokenizer_workers,
            template_timeout=options.template_timeout,
            max_queued_requests=options.max_queued_requests,
            log_format=options.log_format,
            trace_steps=trace is not None,
            **vars(self._config),
        )
        name = options.served_model_name or self._model
        metrics = Metrics(name)
        engine.observers += [metrics]
        if options.log_interval:
            engine.observers.append(StatsLogger(options.log_interval))
        if options.log_requests:
            engine.observers.append(RequestLogger())
        if trace is not None:
            engine.observers.append(trace)
        context = ServerContext(engine, options, name, int(time.time()), self._state, metrics)
        http = HttpServer(CountRequests(make_app(context), self._state, metrics))
        self._handle_signals()
        _warn_of_open_server(options)
        serving = asyncio.ensure_future(http.serve(sockets=[self._sock]))
        try:
            return await self._live(engine, http)
        finally:
            http.stop()
            await serving
            await engine.close()

    async def _live(self, engine: AsyncEngine, http: HttpServer) -> int:
        """Load, serve, and end in order; returns the exit code."""
        stop = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(engine.start())
        died = asyncio.ensure_future(engine.died.wait())
        try:
            await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            starting.result()  # raises what kept it from starting
            self._state.loading = False
            freeze_heap()
            print(_ready_line(self._sock, self._options, engine), flush=True)
            await asyncio.wait((stop, died), return_when=asyncio.FIRST_COMPLETED)
            if not died.done():
                self._state.draining = True
                http.drop_half_requests()
                await self._drain(engine)
            if engine.error is None:
                return 0
            self._state.error = engine.error
            print(f"minisgl serve: error: {engine.error}", file=sys.stderr, flush=True)
            return 1
        finally:
            for task in (stop, starting, died):
                task.cancel()
            await asyncio.gather(stop, starting, died, return_exceptions=True)

    async def _drain(self, engine: AsyncEngine) -> None:
        """Have all requests end, if not by themselves then by aborts, if not by those by force."""
        open_requests = self._state.num_requests
        logger.info("shutting down; %d requests are open", open_requests)
        await self._wait(engine, self._options.shutdown_timeout, signals=1)
        engine.refuse("the server is shutting down")  # what was only being tokenized till now
        engine.abort(None)
        await self._wait(engine, _ABORT_S)
        if engine.num_live:
            logger.warning("the engine did not abort its requests in %g s", _ABORT_S)
        await engine.close()  # at once: whoever still waits is told
        await self._wait(engine, _ABORT_S)

    async def _wait(self, engine: AsyncEngine, seconds: float, signals: int | None = None) -> None:
        """Until no request is open, or the engine died, or someone asked again, or time is up."""
        end = time.monotonic() + seconds
        while self._state.num_requests and engine.error is None and time.monotonic() < end:
            if signals is not None and self._num_signals > signals:
                return
            await asyncio.sleep(0.02)

    def _handle_signals(self) -> None:
        def on_signal() -> None:
            self._num_signals += 1  # whoever asks twice doesn't want to wait
            self._stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _ready_line(sock: socket.socket, options: ServerConfig, engine: AsyncEngine) -> str:
    """The address, and a request that works."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if sock.family == socket.AF_INET else "::1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    path, body = "/v1/completions", {"prompt": "Once upon a time"}
    request: dict[str, Any] = body
    if engine.tokenizer is None:
        request = {"prompt": [1]}
    elif engine.tokenizer.chat_template is not None:
        path, request = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi!"}]}
    key = ""
    if options.api_key is not None:  # it is not shown: logs are read by others
        known = options.api_key == os.environ.get(API_KEY_VARIABLE)
        key = f' -H "Authorization: Bearer {"$" + API_KEY_VARIABLE if known else "YOUR_KEY"}"'
    quote = "'" if "[" in url else ""  # shells read brackets as patterns
    return (
        f"minisgl is ready at {url}; try: curl {quote}{url}{path}{quote}{key} "
        f"-H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    )


def _warn_of_open_server(options: ServerConfig) -> None:
    if options.api_key is not None or options.host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        logger.warning(
            "--host %s is open to other machines, and no --api-key protects it", options.host
        )
