"""What servers send: chunks of an answer as server-sent events, lists of models, errors.

Only what the chat needs is read; other fields are skipped. Errors are understood in the forms
that OpenAI, vLLM, llama-server and FastAPI give them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from minisgl.errors import BusyError, InvalidRequestError, MinisglError, RequestFailedError

from .backend import Chunk

__all__ = ["DONE", "ListedModel", "event_data", "next_chunk", "read_models", "refusal"]

DONE = b"[DONE]"

_BUSY = (429, 503)
_MAX_MESSAGE_LEN = 500


async def event_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event; those of this protocol have one line."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):  # some servers leave out the last blank line
        yield rest[5:].strip()


def next_chunk(last: Chunk, data: bytes) -> Chunk | None:
    """The chunk after `last`, None if the event says nothing, as one of the role alone.

    Until the server tells how many tokens there are, a piece of text counts as one. Raises
    `RequestFailedError` for an error and for what is no event.
    """
    try:
        event = _EVENT.decode(data)
    except msgspec.DecodeError as error:
        raise RequestFailedError(f"the server sent what is no chunk: {error}") from None
    if problem := event.problem():
        raise RequestFailedError(f"the server failed: {_message(problem)}")
    text = "".join(choice.delta.content or "" for choice in event.choices)
    thought = "".join(choice.delta.thought for choice in event.choices)
    finish = next((c.finish_reason for c in event.choices if c.finish_reason), last.finish_reason)
    output, prompt = last.output_tokens + bool(text or thought), last.prompt_tokens
    if event.usage is not None:
        output, prompt = event.usage.completion_tokens, event.usage.prompt_tokens
    chunk = Chunk(text, output, prompt, finish, thought)
    return None if chunk == last._replace(text="", thought="") else chunk


def refusal(status: int, content: bytes) -> MinisglError:
    """The error that a response other than 200 stands for, with the server's own message."""
    try:
        problem = _EVENT.decode(content).problem()
    except msgspec.DecodeError:
        problem = None
    text = f"HTTP {status}: {_message(problem or content.decode('utf-8', 'replace'))}"
    if status in _BUSY:
        return BusyError(text)
    if status >= 500:
        return RequestFailedError(text)
    details = problem if isinstance(problem, dict) else {}
    too_long = details.get("code") == "context_length_exceeded"
    return InvalidRequestError(text, "prompt" if too_long else details.get("param"))


def read_models(content: bytes) -> list[ListedModel]:
    """What `/v1/models` lists; nothing if it is something else."""
    try:
        return msgspec.json.decode(content, type=_Models).data
    except msgspec.DecodeError:
        return []


def _message(problem: Any) -> str:
    """The message of an error object, or all of it where it has none."""
    found = problem.get("message") if isinstance(problem, dict) else problem
    text = found if isinstance(found, str) else json.dumps(problem)
    return " ".join(text.split())[:_MAX_MESSAGE_LEN]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    detail: Any = None
    object: str | None = None
    message: Any = None

    def problem(self) -> Any:
        """The error it tells of, or None."""
        return self.error or self.detail or (self.message if self.object == "error" else None)


class ListedModel(msgspec.Struct):
    """A model that a server offers."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ListedModel]


_EVENT = msgspec.json.Decoder(_Event)
