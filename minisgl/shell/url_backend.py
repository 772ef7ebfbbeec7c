"""`UrlBackend`: a running server, by OpenAI's `/v1/chat/completions`; need not be minisgl's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from minisgl.errors import ConfigError, RequestFailedError
from minisgl.params import SamplingParams

from .backend import Chunk, Message
from .events import DONE, ListedModel, event_data, next_chunk, read_models, refusal
from .loop import LoopThread
from .params import PARAM_NAMES

__all__ = ["UrlBackend", "base_url"]

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)  # a long prefill takes its time
_TIMEOUT_OF_LIST = aiohttp.ClientTimeout(total=30)
_DEFAULTS = SamplingParams()


def base_url(url: str) -> str:
    """The address that paths are appended to: with a scheme, and without the `/v1` that other
    clients expect. Raises `ConfigError`."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        has_host = bool(parts.hostname) and parts.port != 0  # a bad port raises
    except ValueError:
        has_host = False
    is_plain = full.isprintable() and not set(" ?#@\\") & set(full)
    if not (has_host and is_plain and parts.scheme in ("http", "https")):
        raise ConfigError(f"--url = {url!r} must be like http://127.0.0.1:1919")
    return full.rstrip("/").removesuffix("/v1").rstrip("/")


class UrlBackend:
    """A server at a URL and the model asked of it, by default the first that it lists.

    Raises `ConfigError` if there is no server, it refuses the key, or it lists no model.
    See `Backend`.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self._base_url = base_url(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has characters that can't be sent: check --api-key")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession
        self._loop = LoopThread()
        try:
            self._model = self._loop.run(self._connect(model))
        except BaseException:
            self._loop.close()
            raise

    @property
    def context_len(self) -> int | None:
        """See `Backend`."""
        return self._model.max_model_len

    def default_params(self) -> None:
        """See `Backend`: a server does not tell."""
        return None

    def check(self, messages: list[Message], params: SamplingParams) -> None:
        """See `Backend`: a server tells when it is asked for an answer."""

    def stream(
        self, messages: list[Message], params: SamplingParams
    ) -> Generator[Chunk, None, None]:
        """See `Backend`."""
        body = {
            "model": self._model.id,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_changed(params),
        }
        return self._loop.iterate(self._answer(body))

    def close(self) -> None:
        """See `Backend`."""
        self._loop.run(self._session.close())
        self._loop.close()

    # -- in the loop's thread ----------------------------------------------------------------

    async def _connect(self, model: str | None) -> ListedModel:
        # A connection kept from one message to the next may have died in between.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=_TIMEOUT
        )
        try:
            return await self._find(model)
        except BaseException:
            await self._session.close()
            raise

    async def _find(self, name: str | None) -> ListedModel:
        """The model asked for as the server describes it, if it does."""
        async with self._request("GET", "/v1/models", timeout=_TIMEOUT_OF_LIST) as response:
            status, content = response.status, await response.read()
        if status in (401, 403):
            raise ConfigError(f"{self._base_url} refuses the API key: set --api-key")
        listed = read_models(content)
        if name is not None:
            return next((model for model in listed if model.id == name), ListedModel(name))
        if listed:
            return listed[0]
        why = "it lists no model" if status == 200 else str(refusal(status, content))
        raise ConfigError(
            f"{self._base_url}/v1/models: {why}; set --url to an OpenAI-compatible server, or "
            "--model to a model that is not listed"
        )

    async def _answer(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        last = Chunk("", 0)
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise refusal(response.status, await response.read())
            async for data in event_data(response.content):
                if data == DONE:
                    if last.finish_reason is None:
                        yield Chunk("", last.output_tokens, last.prompt_tokens, "stop")
                    return
                if chunk := next_chunk(last, data):
                    yield chunk
                    last = chunk
        if last.finish_reason is None:
            raise RequestFailedError("the server ended in the middle of the answer")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        began = False
        try:
            async with self._session.request(method, self._base_url + path, **options) as response:
                began = True
                yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            if began:
                raise RequestFailedError(
                    f"the connection to {self._base_url} broke in the middle of the answer "
                    f"({reason})"
                ) from None
            raise ConfigError(
                f"no server answers at {self._base_url} ({reason}): start one by `minisgl serve "
                "--model MODEL`, or set --url"
            ) from None


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, which are the server's to choose; the names are theirs."""
    values = {name: getattr(params, name) for name in PARAM_NAMES}
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
