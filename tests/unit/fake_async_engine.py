"""An `AsyncEngine` without processes, which plays scripts.

Every prompt's sequences are what `script(prompt_token_ids, choice)` returns: a list of `Step`s,
of which each turn of the event loop delivers one to every live sequence. With `manual=True` only
`step()` delivers. The generations are real; so is the tokenizer, whose token ids 0 to 255 are
the bytes themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams, TokenLogprobs
from minisgl.errors import BusyError, EngineDeadError, InvalidRequestError
from minisgl.message import EngineReady, EngineStats, RequestStart, SequenceDelta
from minisgl.server.config import ServerConfig
from minisgl.server.context import ServerContext, ServerState
from minisgl.server.generation import Generation, Observer
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.detokenize import _byte_level_alphabet
from minisgl.tokenizer.parts import TokenizerParts

BEGIN, END = 256, 257
VOCAB_SIZE = 300
"""Larger than the tokenizer's, as padded vocabularies are."""


def byte_tokenizer() -> Tokenizer:
    """A token a byte, and `<|begin|>` and `<|end|>`."""
    vocab = _byte_level_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(TokenizerParts(backend, special))


@dataclass(frozen=True)
class Step:
    """What one step gives one sequence; the last one of a script has `finish_reason`."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


Script = Callable[[list[int], int], list[Step]]


def answer(
    text: str, finish_reason: str = "stop", stop_reason: int | str | None = None
) -> list[Step]:
    """A script that gives `text` a byte a step, the characters when they are whole.

    One that stops for no other reason ends with the token `END`.
    """
    steps = []
    for char in text:
        *first, last = char.encode("utf-8")
        steps += [Step("", (byte,)) for byte in first] + [Step(char, (last,))]
    if finish_reason == "stop" and stop_reason is None:
        return [*steps, Step("", (END,), "stop")]
    steps[-1] = replace(steps[-1], finish_reason=finish_reason, stop_reason=stop_reason)
    return steps


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """Made up: the token is the second most likely after its successor; the third can't be."""
    likely = [(1, -0.25), (0, -1.5), (50, float("-inf"))]
    likely += [(60 + i, float("-inf")) for i in range(count - 3)]
    top = tuple(((token_id + offset) % VOCAB_SIZE, logprob) for offset, logprob in likely[:count])
    return TokenLogprobs(token_id, -1.5, 2, top)


@dataclass
class _Live:
    """A sequence that has not ended."""

    generation: Generation
    choice: int
    steps: list[Step]
    started: bool = False


@dataclass
class FakeAsyncEngine:
    """See the module; `submit_error` is raised by the next `submit`s while it is set."""

    script: Script = lambda _ids, choice: answer(f"Hello {choice}")
    manual: bool = False
    num_cached_tokens: int = 0
    max_prompt_len: int = 99
    max_queued: int = 1000
    submit_error: Exception | None = None
    template_error: Exception | None = None
    model: str = "/models/fake"
    config: EngineConfig = field(default_factory=EngineConfig)
    tokenizer: Tokenizer | None = field(default_factory=byte_tokenizer)
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    stats: EngineStats | None = None
    error: EngineDeadError | None = None
    observers: list[Observer] = field(default_factory=list)
    ready: EngineReady = EngineReady(
        max_model_len=100,
        max_running_requests=8,
        capacity_tokens=1600,
        num_pages=100,
        page_size=16,
        device="cpu",
        dtype="float32",
        threads=1,
    )
    submitted: list[Generation] = field(default_factory=list)
    """All generations ever, for tests to look at."""
    options: list[dict[str, Any]] = field(default_factory=list)
    """The keyword arguments of each `submit`."""
    chats: list[dict[str, Any]] = field(default_factory=list)
    """The arguments of each `encode_chat`."""
    aborted: list[str] = field(default_factory=list)
    """Request ids whose live sequences were aborted, by whomever."""
    num_flushes: int = 0

    def __post_init__(self) -> None:
        self._live: dict[int, _Live] = {}
        self._next_uid = 0
        self._playing = False

    # -- what the real one has ---------------------------------------------------------------

    @property
    def model_info(self) -> Any:
        """Only what servers ask of it."""
        config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        return SimpleNamespace(config=config, generation_defaults=self.generation_defaults)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """End what is live."""
        self.abort(None)

    def default_params(self) -> SamplingParams:
        """Complete parameters of a request that names none."""
        return SamplingParams().resolve_defaults(self.generation_defaults)

    def check_count(self, count: int, param: str = "n") -> None:
        """Refuse what can never be there at once."""
        if count > self.ready.max_running_requests + self.max_queued:
            raise InvalidRequestError(f"{count} sequences are never there at once", param)

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """`<|begin|>`, when asked for, and the bytes."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer", "prompt")
            ids = self.tokenizer.encode(prompt)
            return [BEGIN, *ids] if add_special_tokens else ids
        for token in prompt:
            if not 0 <= token < VOCAB_SIZE:
                raise InvalidRequestError(f"token id {token} is not in the vocabulary", "prompt")
        return prompt

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """A line a message."""
        self.chats.append({"messages": messages, **options})
        if self.template_error is not None:
            raise self.template_error
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return await self.encode("".join(lines), add_special_tokens=False)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text."""
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        request_id: str,
        fill_context: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """Check like the real one, and play the scripts."""
        self.options.append({"request_id": request_id, "fill_context": fill_context, **options})
        if self.error is not None or self.submit_error is not None:
            raise self.error or self.submit_error  # type: ignore[misc]
        per_prompt = params if isinstance(params, list) else [params] * len(prompts)
        for ids in prompts:
            if not 1 <= len(ids) <= self.max_prompt_len:
                raise InvalidRequestError(f"the prompt has {len(ids)} tokens", "prompt")
        count = sum(one.n for one in per_prompt)
        self.check_count(count, "n" if len(prompts) == 1 else "prompt")
        if self.num_live + count > self.max_queued:
            raise BusyError("the queue is full")
        made = []
        for index, (ids, one) in enumerate(zip(prompts, per_prompt, strict=True)):
            room = self.ready.max_model_len - len(ids)
            one = one.resolve_defaults(
                self.generation_defaults, max_tokens=room if fill_context else 16
            )
            assert one.max_tokens is not None
            one = replace(one, max_tokens=min(one.max_tokens, room))
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            made.append(self._start(name, ids, one))
            made[-1].group = request_id
        if not self.manual and not self._playing:
            self._playing = True
            asyncio.get_running_loop().call_soon(self._play)
        return made

    def abort(self, request_id: str | None) -> int:
        """End the sequences of a request, or all of them."""
        ended = 0
        for live in list(self._live.values()):
            generation = live.generation
            if request_id is None or request_id in (generation.group, generation.request_id):
                ended += 1
                self._abort(generation)
        return ended

    async def flush_cache(self) -> int:
        """Counted only."""
        self.num_flushes += 1
        return 3

    # -- for tests ---------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Deliver the next `count` steps of every live sequence."""
        for _ in range(count):
            for uid, live in list(self._live.items()):
                self._push(uid, live.steps.pop(0))

    def die(self, message: str = "the scheduler died") -> None:
        """End as an engine does one of whose processes died."""
        self.error = EngineDeadError(message)
        failed = {live.generation.first_uid: live.generation for live in self._live.values()}
        self._live.clear()
        for generation in failed.values():
            generation.fail(self.error)
            self._tell("on_end", generation)

    # -- inside ------------------------------------------------------------------------------

    def _start(self, name: str, ids: list[int], params: SamplingParams) -> Generation:
        made = Generation(name, self._next_uid, ids, params, self._abort)
        for choice in range(params.n):
            steps = _cut(self.script(ids, choice), params.max_tokens or 16)
            self._live[self._next_uid] = _Live(made, choice, steps)
            self._next_uid += 1
        self.submitted.append(made)
        self._tell("on_submit", made)
        return made

    def _abort(self, generation: Generation) -> None:
        live = [uid for uid, live in self._live.items() if live.generation is generation]
        if live:
            self.aborted.append(generation.request_id)
        for uid in live:
            self._push(uid, Step(finish_reason="abort"))

    def _play(self) -> None:
        self.step()
        self._playing = bool(self._live)
        if self._playing:
            asyncio.get_running_loop().call_soon(self._play)

    def _push(self, uid: int, step: Step) -> None:
        live = self._live[uid]
        generation, params = live.generation, live.generation.params
        delta = SequenceDelta(uid, step.text, list(step.token_ids), [])
        delta.finish_reason, delta.stop_reason = step.finish_reason, step.stop_reason
        if params.logprobs is not None:
            delta.logprobs = [logprobs_of(token, params.logprobs) for token in step.token_ids]
        if step.token_ids and not live.started:
            live.started = True
            now = generation.submitted_s
            delta.start = RequestStart(self.num_cached_tokens, now, now, now)
            if params.prompt_logprobs is not None and live.choice == 0:
                count = params.prompt_logprobs
                ids = generation.prompt_token_ids[1:]
                delta.prompt_logprobs = [logprobs_of(token, count) for token in ids]
        if step.finish_reason is not None:
            del self._live[uid]
        generation.push(delta)
        self._tell("on_delta", generation, delta, generation.submitted_s)
        if generation.finished:
            self._tell("on_end", generation)

    def _tell(self, event: str, *arguments: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*arguments)


def _cut(steps: list[Step], max_tokens: int) -> list[Step]:
    """The steps up to `max_tokens` tokens; one that is cut ends for its length."""
    for index in range(len(steps)):
        count = sum(len(step.token_ids) for step in steps[: index + 1])
        if count >= max_tokens and index + 1 < len(steps):
            return [*steps[:index], replace(steps[index], finish_reason="length")]
    return steps


def fake_context(engine: FakeAsyncEngine, **config: Any) -> ServerContext:
    """A server that is ready and calls its model `fake`; `config` are fields of ServerConfig."""
    engine.max_queued = config.get("max_queued_requests", engine.max_queued)
    return ServerContext(
        engine=engine,  # type: ignore[arg-type]
        config=ServerConfig(**config),
        model_name="fake",
        created=1_700_000_000,
        state=ServerState(loading=False),
        metrics=None,  # type: ignore[arg-type]
    )
