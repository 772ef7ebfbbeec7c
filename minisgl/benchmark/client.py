"""One streamed request, measured.

While a stream runs, the client only notes when bytes came (`read`: a time and its bytes) and
leaves reading them to the stream's end: client and server share a machine, and what the client
computes between two tokens is taken from the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import msgspec

from minisgl.errors import ConfigError

__all__ = ["Client", "Failure", "Reply", "read_reply"]

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MESSAGE_LEN = 300


class Failure(NamedTuple):
    """Why a request counts as failed."""

    kind: str
    """`HTTP 503`, `connection`, `timeout`, `error in stream`, `cut off`, `unreadable`"""
    message: str


@dataclass
class Reply:
    """What became of a request; times in seconds of one clock.

    A chunk counts when a choice in it carries text (content, reasoning or a tool call) or the
    reason of its end; a chunk of a role alone, of no choices, or of empty text does not. Usage
    is the server's; where it sends none, chunks with text are counted as output tokens.
    """

    sent_s: float
    """just before the request was sent, its connection included"""
    end_s: float
    """when the stream was read to its end, or failed"""
    first_s: float | None = None
    """the first chunk that counts"""
    last_s: float | None = None
    """the last chunk that counts"""
    text_s: list[float] = field(default_factory=list)
    """each chunk with text"""
    has_usage: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    failure: Failure | None = None

    @property
    def e2e_s(self) -> float:
        """Seconds until the end of the stream."""
        return self.end_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first chunk that counts."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between chunks with text, of one or several tokens each."""
        return [b - a for a, b in zip(self.text_s, self.text_s[1:], strict=False)]


class Client:
    """Sends requests to one endpoint of a server. An async context manager."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        *,
        api_key: str | None,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.base_url = base_url
        self._url = base_url + _PATHS[endpoint]
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._clock = clock

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str | None:
        """The first model that the server lists; None if it lists none.

        Raises `ConfigError` if there is no server, or it wants a key.
        """
        try:
            async with self._session.get(self.base_url + "/v1/models") as response:
                content = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"no server answers at {self.base_url} ({reason}): start one by "
                "`minisgl serve --model MODEL`, or set --url"
            ) from None
        if response.status in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the key (HTTP {response.status}): set --api-key"
            )
        try:
            return msgspec.json.decode(content, type=_Models).data[0].id
        except (msgspec.DecodeError, IndexError):
            return None

    async def stream(self, body: bytes) -> Reply:
        """Send a request and read its stream to the end. What goes wrong is in the reply."""
        reads: list[tuple[float, bytes]] = []
        failure = None
        sent_s = self._clock()
        try:
            async with self._session.post(self._url, data=body, allow_redirects=False) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reads.append((self._clock(), data))
                else:
                    failure = _refused(response.status, await response.read())
        except asyncio.TimeoutError:
            failure = Failure("timeout", f"not ended after {self._timeout_s:g} s (--timeout)")
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure("connection", str(error) or type(error).__name__)
        return read_reply(reads, Reply(sent_s, self._clock(), failure=failure))


def read_reply(reads: Iterable[tuple[float, bytes]], reply: Reply) -> Reply:
    """Fill in what the bytes of a stream say, each read given with its time.

    A stream without a reason of its end and without `[DONE]` was cut off.
    """
    ended = False
    try:
        for time_s, data in _events(reads):
            if data == b"[DONE]":
                ended = True
                continue
            chunk = _CHUNK.decode(data)
            if chunk.error is not None:
                reply.failure = Failure("error in stream", _message(chunk.error))
                return reply
            ended |= _note(reply, chunk, time_s)
    except msgspec.DecodeError as error:
        reply.failure = reply.failure or Failure("unreadable", f"a chunk is no JSON: {error}")
    if not reply.has_usage:
        reply.output_tokens = len(reply.text_s)
    if not ended and reply.failure is None:
        reply.failure = Failure("cut off", "the stream ended without a finish_reason or [DONE]")
    return reply


def _note(reply: Reply, chunk: _Chunk, time_s: float) -> bool:
    """Put one chunk's part into the reply; returns whether it ends a choice."""
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        reply.has_usage = True
        reply.prompt_tokens = chunk.usage.prompt_tokens
        reply.output_tokens = chunk.usage.completion_tokens
        reply.cached_tokens = (details.cached_tokens or 0) if details else 0
    has_text = any(choice.has_text for choice in chunk.choices)
    ends = any(choice.finish_reason is not None for choice in chunk.choices)
    if has_text:
        reply.text_s.append(time_s)
    if has_text or ends:
        reply.last_s = time_s
        if reply.first_s is None:
            reply.first_s = time_s
    return ends


def _events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its end had come."""
    rest, time_s = b"", 0.0
    for time_s, data in reads:
        rest += data
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            yield from _data(event, time_s)
    yield from _data(rest, time_s)  # some servers leave out the last blank line


def _data(event: bytes, time_s: float) -> Iterator[tuple[float, bytes]]:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    if lines:
        yield time_s, b"\n".join(lines)


def _refused(status: int, content: bytes) -> Failure:
    """The failure that an error's body tells of, be it an object with `error` or not."""
    try:
        error = msgspec.json.decode(content, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    return Failure(f"HTTP {status}", _message(error or content.decode("utf-8", "replace")))


def _message(error: Any) -> str:
    """The message of an error object, or all of it where it has none."""
    found = error.get("message") if isinstance(error, dict) else error
    text = found if isinstance(found, str) else msgspec.json.encode(error).decode()
    return " ".join(text.split())[:_MESSAGE_LEN]


# What is read of a chunk; other fields are skipped, which costs next to nothing.


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        part = self.delta
        if part is None:
            return bool(self.text)
        return bool(part.content or part.reasoning_content or part.reasoning or part.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNK = msgspec.json.Decoder(_Chunk)
