"""`AsyncEngine`: a model in processes of its own, used from asyncio.

The server, the terminal chat and users' own programs all stand on it. Invariant: every sequence
that `submit` took ends in exactly one delta with a `finish_reason`, or its `Generation` fails
with an error; when a process dies all of them fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import BusyError, EngineDeadError, InvalidRequestError
from minisgl.llm.llm import engine_config
from minisgl.llm.outputs import RequestOutput, StreamChunk
from minisgl.llm.requests import RequestBuilder, load_tokenizer
from minisgl.message import (
    Abort,
    Decode,
    Deltas,
    Encode,
    EncodeChat,
    EngineReady,
    EngineStats,
    Flush,
    Flushed,
    SequenceDelta,
    Submit,
)
from minisgl.models import ModelInfo, load_model_info
from minisgl.tokenizer import Tokenizer
from minisgl.utils.hf import resolve_model_path
from minisgl.utils.logger import get_logger

from .admission import Admission
from .generation import Generation, Observer
from .processes import Processes, ProcessOptions
from .text import TextSide

__all__ = ["AsyncEngine"]

logger = get_logger(__name__)

Message = dict[str, Any]


class AsyncEngine:
    """A model in processes of its own; its calls belong to one event loop.

        async with AsyncEngine("smollm2") as engine:
            async for chunk in engine.stream("Once upon a time"):
                print(chunk.text, end="")

    `model` and the keyword arguments that are not named here are those of `LLM`.
    `tokenizer_workers` processes do the text work, 0 leaves it to threads; a chat template may
    take `template_timeout` seconds of CPU time; `max_queued_requests` sequences may wait beyond
    those that may run. With `trace_steps`, observers are told when each step was computed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer_workers: int = 0,
        template_timeout: float = 2.0,
        max_queued_requests: int = 1024,
        log_format: str = "text",
        trace_steps: bool = False,
        **config: Any,
    ) -> None:
        self.model = os.fspath(model)
        self.config = engine_config(config)
        self.observers: list[Observer] = []
        self.model_info: ModelInfo
        self.tokenizer: Tokenizer | None = None
        self.ready: EngineReady
        self.stats: EngineStats | None = None
        self.error: EngineDeadError | None = None
        self.died = asyncio.Event()
        """Set when a process died; `error` says which."""
        self.num_live = 0
        """Sequences submitted that have not ended."""
        self._options = ProcessOptions(tokenizer_workers, template_timeout, log_format, trace_steps)
        self._max_queued = max_queued_requests
        self._builder: RequestBuilder
        self._admission: Admission
        self._processes: Processes | None = None
        self._closed = False
        self._refusal: str | None = None
        self._generations: dict[int, Generation] = {}  # by uid, a sequence each
        self._groups: dict[str, list[Generation]] = {}  # by the request id that was given
        self._tickets = itertools.count()
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the processes and load the model; raises what kept one from starting."""
        if self._processes is not None or self._closed:
            raise RuntimeError("An AsyncEngine is started once")
        path = await asyncio.to_thread(self._read_model)
        if self._closed:
            raise EngineDeadError("the engine was closed before it had started")
        self._processes = Processes(
            path, self.tokenizer, vars(self.config), self._options, self._deliver, self._die
        )
        self._processes.on_flushed = self._flushed
        try:
            self.ready = await self._processes.start()
            self._admission = Admission(self.ready, self._builder, self._max_queued)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all processes; what still runs fails with `EngineDeadError`."""
        if not self._closed:
            self._closed = True
            self._fail_all(EngineDeadError("the engine was closed"))
        if self._processes is not None:
            await self._processes.close()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything has ended, and abort what has not after `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            self.abort(None)
            await self._idle.wait()

    def refuse(self, why: str) -> None:
        """Take no more requests: `submit` raises `BusyError` with these words."""
        self._refusal = why

    # -- text ------------------------------------------------------------------------------

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt, checked to be in the vocabulary.

        A text may have more than `max_prompt_len` tokens (`submit` takes no such prompt), unless
        that can be told before they are looked for.
        """
        if isinstance(prompt, str):
            processes = self._running()
            self._admission.check_text(prompt)
            question = Encode(0, prompt, add_special_tokens)
            return self._builder.tokens((await processes.text.ask(question)).token_ids)
        if len(prompt) > self.max_prompt_len:
            self._admission.check_length(len(prompt))  # before looking at each of them
        return self._builder.encode(prompt)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, which runs in a process that
        is killed if it loops. Raises `ChatTemplateError`."""
        question = EncodeChat(
            0, list(messages), add_generation_prompt, continue_final_message, tools, template_kwargs
        )
        return self._builder.tokens((await self._running().text.ask(question)).token_ids)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        self._builder.encode(token_ids)
        question = Decode(0, token_ids, skip_special_tokens)
        return (await self._running().text.ask(question)).text

    # -- generating ------------------------------------------------------------------------

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that is taken: one more is generated at least."""
        return self._admission.max_prompt_len

    def default_params(self) -> SamplingParams:
        """The parameters that an empty `SamplingParams()` stands for with this model."""
        return SamplingParams().resolve_defaults(self.model_info.generation_defaults)

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        fill_context: bool = False,
    ) -> list[Generation]:
        """Queue prompts of token ids, all or none; a `Generation` for each.

        Everything is checked first: `InvalidRequestError` names the parameter, `BusyError` says
        that the queue is full. With `fill_context` a missing `max_tokens` means what is left of
        the context. Several prompts get the ids `request_id-0`, `request_id-1`, ...
        """
        processes = self._running()
        if self._refusal is not None:
            raise BusyError(self._refusal)
        admission = self._admission
        complete = admission.complete(prompts, params, fill_context)
        count = sum(one.n for one in complete)
        admission.check_count(count, "n" if len(prompts) == 1 else "prompt")
        admission.check_room(count, self.num_live)
        messages = admission.messages(prompts, complete, priority, cache_salt)
        _send(messages, processes.text)
        made = []
        for index, message in enumerate(messages):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            generation = Generation(
                name, message.first_uid, message.token_ids, message.params, self._abort
            )
            generation.group = request_id
            self._generations.update(dict.fromkeys(_uids(message), generation))
            self._groups.setdefault(request_id, []).append(generation)
            self.num_live += message.params.n
            self._idle.clear()
            made.append(generation)
            self._tell("on_submit", generation)
        return made

    def check_count(self, count: int, param: str = "n") -> None:
        """Raise `InvalidRequestError`, which names `param`, if so many sequences can never be
        there at once. `submit` does; before there are ids, nothing needs to be done in vain."""
        self._admission.check_count(count, param)

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Complete one prompt."""
        ids = await self.encode(prompt)
        [generation] = self.submit(
            [ids],
            params or SamplingParams(),
            request_id=_new_id(),
            priority=priority,
            cache_salt=cache_salt,
        )
        async with generation:
            return await generation.result()

    async def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fill_context: bool = False,
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt and yield its text as it comes; closing the iterator aborts."""
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"a stream has one sequence, not n = {params.n}", "n")
        ids = await self.encode(prompt)
        [generation] = self.submit(
            [ids],
            params,
            request_id=_new_id(),
            priority=priority,
            cache_salt=cache_salt,
            fill_context=fill_context,
        )
        async with generation:
            async for deltas in generation.deltas():
                for delta in deltas:
                    yield StreamChunk(delta.text, delta.token_ids, delta.finish_reason)

    def abort(self, request_id: str | None) -> int:
        """End the requests of this id, or all; returns how many sequences that were."""
        if request_id is None:
            generations = list(dict.fromkeys(self._generations.values()))
        else:
            generations = list(self._groups.get(request_id, ()))
            if not generations:
                every = self._generations.values()
                generations = list(dict.fromkeys(g for g in every if g.request_id == request_id))
        count = sum(generation.num_open for generation in generations)
        for generation in generations:
            generation.abort()
        return count

    async def flush_cache(self) -> int:
        """Forget all cached prefixes that no running request reads; returns the pages freed."""
        processes = self._running()
        ticket = next(self._tickets)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes[ticket] = future
        try:
            processes.scheduler.send(Flush(ticket))
            return await future
        finally:
            del self._flushes[ticket]

    # -- inside ----------------------------------------------------------------------------

    def _read_model(self) -> str:
        path = resolve_model_path(self.model)
        self.model_info = load_model_info(path)
        self.tokenizer = load_tokenizer(path)
        self._builder = RequestBuilder.of(self.model_info, self.tokenizer)
        if self.tokenizer is not None:
            self.tokenizer.text_bound  # noqa: B018 - found here: it would keep a request waiting
        return path

    def _running(self) -> Processes:
        if self.error is not None:
            raise self.error
        if self._closed or self._processes is None or not self._processes.is_ready:
            raise BusyError("the engine was not started, or was closed")
        return self._processes

    def _abort(self, generation: Generation) -> None:
        if self._processes is not None and self.error is None and not self._closed:
            uids = range(generation.first_uid, generation.first_uid + generation.params.n)
            self._processes.text.abort(Abort(list(uids)))

    def _deliver(self, message: Deltas) -> None:
        """Hand a step's deltas to their generations."""
        now = time.monotonic()
        for delta in message.deltas:
            generation = self._generations.get(delta.uid)
            if generation is None:
                continue
            generation.push(delta)
            self._tell("on_delta", generation, delta, now)
            if delta.finish_reason is not None:
                self._forget(generation, delta)
        stats = message.stats
        if self.stats is None or stats.time_s > self.stats.time_s:
            self.stats = stats
            self._tell("on_stats", stats)
        for step in message.steps:
            self._tell("on_step", step)

    def _forget(self, generation: Generation, delta: SequenceDelta) -> None:
        del self._generations[delta.uid]
        self.num_live -= 1
        if generation.finished:
            self._ended(generation)
        if self.num_live == 0:
            self._idle.set()

    def _ended(self, generation: Generation) -> None:
        group = self._groups[generation.group]
        group.remove(generation)
        if not group:
            del self._groups[generation.group]
        self._tell("on_end", generation)

    def _tell(self, event: str, *arguments: Any) -> None:
        """Tell the observers; where one of them fails, nothing else does."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*arguments)
            except Exception:
                logger.exception("An observer failed")

    def _flushed(self, message: Flushed) -> None:
        future = self._flushes.get(message.ticket)
        if future is not None and not future.done():
            future.set_result(message.num_pages)

    def _die(self, error: EngineDeadError) -> None:
        if self.error is None and not self._closed:
            self.error = error
            self._fail_all(error)
            self.died.set()

    def _fail_all(self, error: EngineDeadError) -> None:
        generations = list(dict.fromkeys(self._generations.values()))
        self._generations.clear()
        self.num_live = 0
        for generation in generations:
            generation.fail(error)
            self._ended(generation)
        self._idle.set()
        for future in self._flushes.values():
            if not future.done():
                future.set_exception(error)


def _uids(message: Submit) -> range:
    return range(message.first_uid, message.first_uid + message.params.n)


def _send(messages: list[Submit], text: TextSide) -> None:
    """Send all; if one can't be, those before it are ended."""
    sent: list[Submit] = []
    try:
        for message in messages:
            text.submit(message)
            sent.append(message)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error says why
            for message in sent:
                text.abort(Abort(list(_uids(message))))
        raise


def _new_id() -> str:
    return f"req-{secrets.token_hex(8)}"
