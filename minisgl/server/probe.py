"""`Probe`: whether the engine generates, tried out on one token."""

from __future__ import annotations

import asyncio
import secrets
import time

from minisgl.core import SamplingParams
from minisgl.errors import BusyError, RequestFailedError
from minisgl.message import SequenceDelta

from .context import ServerContext
from .errors import ApiError
from .generation import Generation, Observer

__all__ = ["Probe"]

TIMEOUT_S = 20.0
"""How long a token may take; a step with a long prompt may come first."""
FRESH_S = 1.0
"""How long a token says that the engine is well."""
PRIORITY = -(2**31)
"""Before everyone: a long queue is no sign of ill health."""


class Probe:
    """Asked by anyone, as often as they like: there is one token at a time for all of them."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._running: asyncio.Task[None] | None = None
        self._passed_s = float("-inf")

    async def check(self) -> None:
        """Return once a token was generated; a 503 `ApiError`, or the engine's, if none is."""
        if time.monotonic() - self._passed_s < FRESH_S:
            return
        if self._running is None:
            self._running = asyncio.ensure_future(self._run())
            self._running.add_done_callback(self._ended)
        await asyncio.shield(self._running)  # who goes away leaves the others their answer

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is None:
            self._passed_s = time.monotonic()

    async def _run(self) -> None:
        try:
            await asyncio.wait_for(self._token(), TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(503, f"no token within {TIMEOUT_S:g} s", code="unhealthy") from None
        except RequestFailedError as error:
            raise ApiError(503, str(error), code="unhealthy") from error

    async def _token(self) -> None:
        """Generate a token, or wait for one of others if the queue is full.

        It has a salt of its own, so that no request finds the probe's prompt in the prefix cache.
        """
        engine = self._context.engine
        bos = engine.tokenizer.bos_token_id if engine.tokenizer is not None else None
        name = f"health-{secrets.token_hex(8)}"
        try:
            (generation,) = engine.submit(
                [[bos or 0]],
                SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                request_id=name,
                priority=PRIORITY,
                cache_salt=name,
            )
        except BusyError:
            await self._token_of_others()
            return
        async with generation:
            result = await generation.result()
        if result.finish_reason == "abort":
            raise ApiError(503, "the token was aborted", code="unhealthy")

    async def _token_of_others(self) -> None:
        watch = _Watch()
        observers = self._context.engine.observers
        observers.append(watch)
        try:
            await watch.token.wait()
        finally:
            observers.remove(watch)


class _Watch(Observer):
    """Waits for a token, whoever's it is."""

    def __init__(self) -> None:
        self.token = asyncio.Event()

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """Take note."""
        if delta.token_ids:
            self.token.set()
