"""`OpenAICall`: a submitted request of either endpoint, and its answer, whole or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from minisgl.message import SequenceDelta

from .choices import Choice, Piece
from .generation import Generation
from .logprobs import TokenTexts, prompt_logprobs
from .protocol import SamplingBody
from .responses import Usage, count_usage

__all__ = ["Arrival", "Heading", "OpenAICall", "merged"]


class Arrival(NamedTuple):
    """Deltas of one of several generations."""

    prompt: int
    """Index of the generation."""
    deltas: list[SequenceDelta]


@dataclass(frozen=True)
class Heading:
    """What the answer or all its chunks begin with."""

    request_id: str
    """What the engine knows the request by; not shown in the body."""
    fields: dict[str, Any]
    """`id`, `object`, `created`, `model`, `system_fingerprint`."""


class OpenAICall:
    """A submitted request; use either `response` or `chunks`.

    Leaving its `async with` block aborts what has not ended. `choices` are those of all
    sequences, the `n` of a prompt next to each other. `prompt_texts` are given if the prompt's
    logprobs belong beside the choices.
    """

    def __init__(
        self,
        heading: Heading,
        request: SamplingBody,
        generations: Sequence[Generation],
        choices: Sequence[Choice],
        prompt_texts: TokenTexts | None = None,
    ) -> None:
        self.request_id = heading.request_id
        self.stream = request.stream
        self._fields = heading.fields
        self._generations = generations
        self._choices = choices
        self._prompt_texts = prompt_texts
        self._prompt_top = request.prompt_logprobs
        self._n = request.n
        self._num_output_tokens = 0
        options = request.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    async def __aenter__(self) -> OpenAICall:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for generation in self._generations:
            generation.abort()

    async def response(self) -> dict[str, Any]:
        """The whole answer: a `ChatCompletion` or a `Completion`."""
        results = [await generation.result() for generation in self._generations]
        outputs = [output for result in results for output in result.outputs]
        self._num_output_tokens = sum(len(output.token_ids) for output in outputs)
        pieces = [
            Piece([o.text], o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason)
            for o in outputs
        ]
        choices = [c.whole(piece) for c, piece in zip(self._choices, pieces, strict=True)]
        answer = {**self._fields, "choices": choices, "usage": self._usage()}
        texts, top, scored = self._prompt_texts, self._prompt_top, results[0].prompt_logprobs
        if texts is not None and top is not None and scored is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scored, texts, top=top)
        return answer

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The chunks of each turn, of which each choice has one at most.

        What came for a choice is kept in `pieces` until it makes a chunk.
        """
        pieces: dict[int, Piece] = {}
        async with aclosing(merged(self._generations)) as arrivals:
            async for prompt, deltas in arrivals:
                for delta in deltas:
                    choice = prompt * self._n + self._generations[prompt].index_of(delta)
                    pieces.setdefault(choice, Piece()).add(delta)
                    self._num_output_tokens += len(delta.token_ids)
                chunks = []
                for choice in list(pieces):
                    shape = self._choices[choice].delta(pieces[choice])
                    if shape is not None:
                        del pieces[choice]
                        chunks.append({**self._fields, "choices": [shape], **self._usage_so_far()})
                if chunks:
                    yield chunks
        if self._usage_at_end:
            yield [{**self._fields, "choices": [], "usage": self._usage()}]

    def _usage_so_far(self) -> dict[str, Usage | None]:
        """The field of a chunk, if it has one."""
        if self._usage_always:
            return {"usage": self._usage()}
        return {"usage": None} if self._usage_at_end else {}

    def _usage(self) -> Usage:
        return count_usage(
            sum(len(generation.prompt_token_ids) for generation in self._generations),
            self._num_output_tokens,
            sum(generation.num_cached_tokens for generation in self._generations),
        )


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[Arrival, None]:
    """The deltas of all generations as they come; raises the first error of any."""
    if len(generations) == 1:
        async for deltas in generations[0].deltas():
            yield Arrival(0, deltas)
        return
    arrivals: asyncio.Queue[Arrival | Exception | None] = asyncio.Queue()  # None: one has ended

    async def forward(prompt: int, generation: Generation) -> None:
        try:
            async for deltas in generation.deltas():
                arrivals.put_nowait(Arrival(prompt, deltas))
        except Exception as error:
            arrivals.put_nowait(error)
        else:
            arrivals.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(*item)) for item in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_open -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
