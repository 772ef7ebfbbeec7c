"""`BatchRunner`: workers that take lines and write answers, until the input ends."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, BinaryIO

from minisgl.errors import EngineDeadError, InvalidRequestError

from ..context import ServerContext
from ..errors import error_body, to_api_error
from ..openai import OpenAIService
from ..openai_call import OpenAICall
from ..protocol import ChatCompletionRequest, CompletionRequest, SamplingBody
from .lines import (
    BatchLine,
    Refusal,
    answered_line,
    duplicate,
    parse_line,
    read_lines,
    refused_line,
)
from .output import OutputFile
from .progress import Progress

__all__ = ["BatchRunner"]

Todo = AsyncGenerator[BatchLine | Refusal, None]


class BatchRunner:
    """Answers the lines of one input, those apart that `output` has answers to already.

    A line that fails, in whatever way, gets an answer that says so, and the others go on. The
    context's engine must take what `concurrency` requests can ask for, however they queue.
    """

    def __init__(self, context: ServerContext, output: OutputFile, progress: Progress) -> None:
        self._service = OpenAIService(context)
        self._max_bytes = context.config.max_body_size
        self._output = output
        self._progress = progress

    async def run(self, file: BinaryIO, concurrency: int) -> None:
        """Answer all lines of an unbuffered file, `concurrency` of them at a time.

        Raises `EngineDeadError` when the engine dies, and `OSError` when the output can't be
        written. Then, and when it is cancelled, requests that run are aborted and their lines
        left for another run.
        """
        async with aclosing(self._todo(file)) as todo:
            turn = asyncio.Lock()
            workers = [asyncio.ensure_future(self._work(todo, turn)) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, todo: Todo, turn: asyncio.Lock) -> None:
        while True:
            async with turn:  # a generator takes one caller at a time
                line = await anext(todo, None)
            if line is None:
                return
            if isinstance(line, Refusal):
                self._output.write(refused_line(line))
                self._progress.count(failed=True)
            else:
                await self._answer(line)

    async def _todo(self, file: BinaryIO) -> Todo:
        """What is to be answered, in the input's order."""
        seen: set[str] = set()
        async with aclosing(read_lines(file, self._max_bytes)) as lines:
            async for line in lines:
                parsed = parse_line(line, self._max_bytes)
                custom_id = parsed.custom_id
                if custom_id is None:
                    yield parsed
                elif custom_id in seen:
                    yield duplicate(line.number, custom_id)
                elif custom_id in self._output.done:
                    seen.add(custom_id)
                    self._progress.num_skipped += 1
                else:
                    seen.add(custom_id)
                    yield parsed

    async def _answer(self, line: BatchLine) -> None:
        request_id = f"req_{secrets.token_hex(16)}"
        status = 200
        try:
            async with await self._submit(line, request_id) as call:
                body: Any = await call.response()
        except EngineDeadError:
            raise  # says nothing about the line, and every other one would fail too
        except Exception as error:
            known = to_api_error(error)
            status, body = known.status, error_body(known)
        self._output.write(answered_line(line.custom_id, request_id, status, body))
        self._progress.count(failed=status != 200)

    async def _submit(self, line: BatchLine, request_id: str) -> OpenAICall:
        if line.url == "/v1/chat/completions":
            chat = ChatCompletionRequest.model_validate(line.body)
            _check_no_stream(chat)
            return await self._service.chat(chat, request_id)
        completion = CompletionRequest.model_validate(line.body)
        _check_no_stream(completion)
        return await self._service.completion(completion, request_id)


def _check_no_stream(request: SamplingBody) -> None:
    if request.stream:
        raise InvalidRequestError(
            "stream = True: the answers of a batch are whole; leave it out", "stream"
        )
