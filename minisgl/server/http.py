"""uvicorn, with a bound on request heads and without signal handlers of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.errors import ConfigError

from .errors import ApiError, error_response

__all__ = ["HttpServer", "listen"]

MAX_HEAD_BYTES = 64 << 10
"""Of a request line with its headers. The parser itself would collect any number."""
MAX_PIPELINED = 4
"""Requests that a connection may send ahead of their answers; hardly any client sends one."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which nobody else may use; port 0 takes a free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)  # here already: clients that come early wait instead of failing
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't listen on --host {host} --port {port}: {why}") from error
    return sock


class _Protocol(HttpToolsProtocol):
    """Ends connections whose request head does not, and those whose trailers don't.

    head ──> body ──> head ...                                     an ordinary body, or none
    head ──> trailers ──> body ──> ... trailers ──> head ...       a body in chunks: behind the
                                                                   size of each may come trailers
    """

    _part = "head"
    _part_bytes = 0
    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests of this connection, in turn, whose answer is not complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request that waits or runs; uvicorn tells the last one only."""
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def drop_half_request(self) -> None:
        """Close the connection if a request's body has begun and not ended."""
        if self._part != "head" and not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._part_bytes += len(data)
        super().data_received(data)
        is_bounded = self._part != "body"
        if is_bounded and self._part_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"the request's headers exceed {MAX_HEAD_BYTES} bytes"
            self._hang_up(ApiError(431, message, code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what its parser did not take."""
        self._hang_up(ApiError(400, "the request is not valid HTTP"))

    def _hang_up(self, error: ApiError) -> None:
        if self._may_answer():
            response = error_response(error)
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
            headers = [b"%s: %s" % header for header in response.raw_headers]
            lines = [status, *headers, b"connection: close", b"", bytes(response.body)]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether what is said now will be taken for the answer to what comes in."""
        cycle = self.cycle  # of the request whose head came last
        if self._part == "head":
            return cycle is None or cycle.response_complete
        return not cycle.response_started and not self.pipeline

    def _begin(self, part: str) -> None:
        self._part, self._part_bytes = part, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "head":  # a trailer is no header, and nobody asks for any
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycles = (*self._cycles, self.cycle)
        self._cycles = tuple(cycle for cycle in cycles if not cycle.response_complete)
        # uvicorn reads no further while a request waits for the one before it, and would not see
        # the client go. We read on, and bound what can wait.
        self.flow.resume_reading()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        self._begin("body")

    def on_chunk_header(self) -> None:
        self._begin("trailers")

    def on_body(self, body: bytes) -> None:
        self._begin("body")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begin("head")  # of the next request
        super().on_message_complete()


class HttpServer(uvicorn.Server):
    """Serves an application until `stop`; signals are its owner's business."""

    def __init__(self, app: ASGIApp) -> None:
        for name in ("uvicorn", "asyncio"):  # they speak in our log's form, if they must
            theirs = logging.getLogger(name)
            theirs.handlers = list(logging.getLogger("minisgl").handlers)
            theirs.setLevel(logging.WARNING)
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )

    def stop(self) -> None:
        """Take no more connections, and end when those that are open have their answers."""
        self.should_exit = True
        self.drop_half_requests()

    def drop_half_requests(self) -> None:
        """Close connections on which a request has begun to come and not ended."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, _Protocol)
            connection.drop_half_request()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals alone."""
        yield
