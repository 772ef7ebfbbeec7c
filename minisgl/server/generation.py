"""`Generation`: a submitted prompt, as its caller follows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.errors import RequestFailedError
from minisgl.llm.outputs import CompletionOutput, RequestOutput
from minisgl.message import EngineStats, RequestStart, SequenceDelta, StepTrace

__all__ = ["Generation", "Observer"]


class Observer:
    """Is told what happens in an engine, in the event loop's thread; must be quick.

    A base class: what a subclass does not care about, it leaves out.
    """

    def on_submit(self, generation: Generation) -> None:
        """A request was queued."""

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """A sequence of it got tokens, or ended; `now_s` is of the monotonic clock."""

    def on_end(self, generation: Generation) -> None:
        """All its sequences ended, or it was dropped; `generation.finish_reasons` says how."""

    def on_stats(self, stats: EngineStats) -> None:
        """A step was done."""

    def on_step(self, step: StepTrace) -> None:
        """The result of a step was read; told only by an engine with `trace_steps`."""


class Generation:
    """The `n` sequences of one prompt while they are generated.

    `deltas()` or `result()` is awaited once. Leaving the `async with` block aborts what has not
    ended:

        async with engine.submit(ids, params) as generation:
            async for deltas in generation.deltas():
                ...
    """

    def __init__(
        self,
        request_id: str,
        first_uid: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[Generation], None],
    ) -> None:
        self.request_id = request_id
        self.group = request_id
        """The id that the whole request was given; of several prompts, each has one of its own."""
        self.first_uid = first_uid
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        """Complete, with the model's defaults."""
        self.start: RequestStart | None = None
        """Known with the first token."""
        self.submitted_s = time.monotonic()
        self.ended_s: float | None = None
        self.num_output_tokens = 0
        """Of all sequences so far."""
        self.finish_reasons: list[str | None] = [None] * params.n
        """`"stop"`, `"length"`, `"abort"` or `"error"` of each sequence that ended."""
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.num_open = params.n
        """Sequences that have not ended."""
        self._abort = abort
        self._arrived: list[SequenceDelta] = []
        self._error: Exception | None = None
        self._event = asyncio.Event()

    # -- for callers -----------------------------------------------------------------------

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first sequence to start read from the prefix cache."""
        return self.start.num_cached_tokens if self.start is not None else 0

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """One entry a prompt token (the first is None), when asked for; complete at the end."""
        if self.params.prompt_logprobs is None:
            return None
        return [None, *self._prompt_logprobs]

    @property
    def num_scored(self) -> int | None:
        """How many entries `prompt_logprobs` has so far; None when not asked for."""
        return None if self.params.prompt_logprobs is None else 1 + len(self._prompt_logprobs)

    @property
    def finished(self) -> bool:
        """Whether every sequence ended."""
        return self.num_open == 0

    def index_of(self, delta: SequenceDelta) -> int:
        """Which of the `n` sequences a delta belongs to."""
        return delta.uid - self.first_uid

    async def deltas(self) -> AsyncIterator[list[SequenceDelta]]:
        """What came since the last turn, never empty; ends when all sequences have ended.

        Raises `RequestFailedError` when the engine failed on this request, `EngineDeadError`
        when it died.
        """
        while True:
            while not self._arrived and self._error is None:
                self._event.clear()
                await self._event.wait()
            if self._error is not None:
                raise self._error
            arrived, self._arrived = self._arrived, []
            if any(delta.finish_reason == "error" for delta in arrived):
                raise RequestFailedError("the engine failed while it computed this request")
            yield arrived
            if self.finished and not self._arrived and self._error is None:
                return

    async def result(self) -> RequestOutput:
        """All sequences, whole."""
        texts: list[list[str]] = [[] for _ in range(self.params.n)]
        ids: list[list[int]] = [[] for _ in texts]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in texts]
        stop_reasons: list[int | str | None] = [None] * len(texts)
        async for arrived in self.deltas():
            for delta in arrived:
                index = self.index_of(delta)
                texts[index].append(delta.text)
                ids[index] += delta.token_ids
                logprobs[index] += delta.logprobs
                if delta.finish_reason is not None:
                    stop_reasons[index] = delta.stop_reason
        wanted = self.params.logprobs is not None
        return RequestOutput(
            prompt=None,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=index,
                    text="".join(texts[index]),
                    token_ids=ids[index],
                    finish_reason=self.finish_reasons[index] or "abort",
                    stop_reason=stop_reasons[index],
                    logprobs=logprobs[index] if wanted else None,
                )
                for index in range(self.params.n)
            ],
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )

    def abort(self) -> None:
        """Ask for its end; sequences that have not ended end with `"abort"`."""
        if not self.finished:
            self._abort(self)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    # -- for the engine --------------------------------------------------------------------

    def push(self, delta: SequenceDelta) -> None:
        """Take a delta of one of the sequences."""
        if delta.start is not None and self.start is None:
            self.start = delta.start
        self.num_output_tokens += len(delta.token_ids)
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reasons[self.index_of(delta)] = delta.finish_reason
            self.num_open -= 1
            if self.num_open == 0:
                self.ended_s = time.monotonic()
        self._arrived.append(delta)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """End it with an error that its caller gets raised."""
        self.finish_reasons = [reason or "error" for reason in self.finish_reasons]
        self.num_open = 0
        self.ended_s = time.monotonic()
        self._error = error
        self._event.set()
