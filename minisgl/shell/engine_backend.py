"""`EngineBackend`: a model in processes of our own, by `AsyncEngine`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Generator

from minisgl.params import SamplingParams
from minisgl.server.async_engine import AsyncEngine

from .backend import Chunk, Message
from .loop import LoopThread

__all__ = ["EngineBackend"]


class EngineBackend:
    """An `AsyncEngine`, started and closed with it. See `Backend`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._ids = (f"chat-{i}" for i in itertools.count())
        self._loop = LoopThread()
        try:
            self._loop.run(engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def context_len(self) -> int:
        """See `Backend`."""
        return self._engine.max_prompt_len + 1

    def default_params(self) -> SamplingParams:
        """See `Backend`."""
        return self._engine.default_params()

    def check(self, messages: list[Message], params: SamplingParams) -> None:
        """See `Backend`: token ids must be in the vocabulary, and the template must agree."""
        params.check_vocabulary(self._engine.model_info.config.vocab_size)
        self._loop.run(self._engine.encode_chat(messages))

    def stream(
        self, messages: list[Message], params: SamplingParams
    ) -> Generator[Chunk, None, None]:
        """See `Backend`."""
        return self._loop.iterate(self._answer(messages, params))

    async def _answer(
        self, messages: list[Message], params: SamplingParams
    ) -> AsyncGenerator[Chunk, None]:
        ids = await self._engine.encode_chat(messages)
        [generation] = self._engine.submit(
            [ids], params, request_id=next(self._ids), fill_context=True
        )
        async with generation:
            async for deltas in generation.deltas():
                yield Chunk(
                    "".join(delta.text for delta in deltas),
                    generation.num_output_tokens,
                    len(ids),
                    deltas[-1].finish_reason,
                )

    def close(self) -> None:
        """See `Backend`."""
        self._loop.run(self._engine.close())
        self._loop.close()
