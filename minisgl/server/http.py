"""uvicorn, with a bound on request heads and without signal handlers of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.errors import ConfigError

__all__ = ["HttpServer", "listen"]

MAX_HEAD_BYTES = 64 << 10
"""Of a request line with its headers. The parser itself would collect any number."""
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_TOO_LARGE_BODY = (
    b'{"error":{"message":"the request\'s headers exceed %d bytes","type":'
    b'"invalid_request_error","param":null,"code":"headers_too_large"}}' % MAX_HEAD_BYTES
)


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
    """Ends connections whose request head does not."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE % (len(_TOO_LARGE_BODY), _TOO_LARGE_BODY))
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


class HttpServer(uvicorn.Server):
    """Serves an application until `stop`; signals are its owner's business."""

    def __init__(self, app: ASGIApp) -> None:
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals alone."""
        yield
