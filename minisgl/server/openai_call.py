"""`OpenAICall`: a submitted request of either endpoint, and its answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from .choices import Choice, Piece, Prompt
from .large import apart, num_entries
from .protocol import SamplingBody
from .responses import Usage, count_usage
from .submitted import Submitted, merged

__all__ = ["Heading", "OpenAICall"]


@dataclass(frozen=True)
class Heading:
    """What the answer or all its chunks begin with."""

    request_id: str
    """What the engine knows the request by; not shown in the body."""
    fields: dict[str, Any]
    """`id`, `object`, `created`, `model`, `system_fingerprint`."""


class OpenAICall(Submitted):
    """A submitted request; use either `response` or `chunks`.

    `choices` are those of all sequences, the `n` of a prompt next to each other. The prompt's
    logprobs are in its choices, or `beside` them.
    """

    def __init__(
        self,
        heading: Heading,
        request: SamplingBody,
        prompts: Sequence[Prompt],
        choices: Sequence[Choice],
        *,
        beside: bool = False,
    ) -> None:
        super().__init__(heading.request_id, [prompt.generation for prompt in prompts])
        self.stream = request.stream
        self._fields = heading.fields
        self._prompts = prompts
        self._choices = choices
        self._beside = beside
        self._n = request.n
        self._num_output_tokens = 0
        options = request.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    async def response(self) -> dict[str, Any]:
        """The whole answer: a `ChatCompletion` or a `Completion`."""
        results = [await generation.result() for generation in self._generations]
        for prompt in self._prompts:
            await prompt.prepare()
        outputs = [output for result in results for output in result.outputs]
        self._num_output_tokens = sum(len(output.token_ids) for output in outputs)
        pieces = [
            Piece([o.text], o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason)
            for o in outputs
        ]
        choices = await apart(
            num_entries(0, self._generations[0].params, self._num_output_tokens),
            lambda: [c.whole(piece) for c, piece in zip(self._choices, pieces, strict=True)],
        )
        answer = {**self._fields, "choices": choices, "usage": self._usage()}
        if self._beside and self._prompts[0].logprobs is not None:
            answer["prompt_logprobs"] = self._prompts[0].logprobs
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
                await self._prompts[prompt].prepare()
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
