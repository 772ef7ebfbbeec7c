"""`LLM`: load a model and generate, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from minisgl.config import EngineConfig
from minisgl.core import Req, SamplingParams
from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.message import make_reqs
from minisgl.models import load_model_info
from minisgl.scheduler import build_scheduler
from minisgl.utils.hf import resolve_model_path
from minisgl.utils.signals import catch_interrupts, hold_interrupts

from .outputs import RequestOutput, StreamChunk
from .progress import Progress
from .requests import (
    Params,
    Prompts,
    RequestBuilder,
    as_prompt_list,
    cache_salts,
    load_tokenizer,
    naming_prompt,
    params_list,
    priorities,
)
from .sequence import Sequence

__all__ = ["LLM"]

Message = dict[str, Any]


class LLM:
    """A model in this process.

    >>> with LLM("smollm2") as llm:                                    # doctest: +SKIP
    ...     print(llm.generate("The capital of France is")[0].text)

    `model` is a folder, a GGUF file, a hub id, or `smollm2`; keyword arguments are the fields
    of `minisgl.config.EngineConfig`. Calls are not thread-safe; several instances can live in
    one process. Raises `MinisglError`s: see `minisgl/errors.py`.
    """

    def __init__(self, model: str | os.PathLike[str], **config: Any) -> None:
        self.config = engine_config(config)
        path = resolve_model_path(model)
        self.model_info = info = load_model_info(path)
        self.tokenizer = load_tokenizer(path)
        self._built = build_scheduler(path, info, self.config)
        self.scheduler, self.engine = self._built.scheduler, self._built.engine
        self.max_model_len = self.engine.plan.max_model_len
        self._builder = RequestBuilder.of(info, self.tokenizer)
        self._sequences: dict[int, Sequence] = {}
        self._next_uid = 0
        self._closed = False

    # -- generating ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        priority: int | SequenceOf[int] = 0,
        cache_salt: str | SequenceOf[str | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results are in the prompts' order.

        `params` is one for all or a list with one for each (another length raises). So are
        `priority`, the smaller the earlier, and `cache_salt`: prompts share cached prefixes only
        with those of the same salt. All prompts are checked before any runs; an error names the
        prompt's index.
        """
        given = as_prompt_list(prompts)
        made = self._make_all(given, params, priority, cache_salt, fill_context=False)
        return self._run(given, made, use_tqdm)

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: Params = None,
        *,
        priority: int | SequenceOf[int] = 0,
        cache_salt: str | SequenceOf[str | None] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is `{"role": ..., "content": ...}`. Without `max_tokens` an answer may take
        what is left of the context. `template_options` go to the template; the other options
        are those of `generate`.
        """
        given = list(messages)
        several = bool(given) and isinstance(given[0], (list, tuple))
        conversations: list[Any] = given if several else [given]
        prompts = []
        for index, conversation in enumerate(conversations):
            with naming_prompt(index, len(conversations)):
                prompts.append(self.encode_chat(conversation, **template_options))
        made = self._make_all(prompts, params, priority, cache_salt, fill_context=True)
        return self._run(prompts, made, use_tqdm)

    def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        fill_context: bool = False,
    ) -> Iterator[StreamChunk]:
        """Generate one sequence and yield its text as it comes; closing the iterator aborts.

        The prompt is checked now and queued when the first chunk is asked for. With
        `fill_context`, a missing `max_tokens` means what is left of the context, not 16;
        `priority` and `cache_salt` are those of `generate`.
        """
        prompts = as_prompt_list(prompt)
        [one] = params_list(params, 1)
        if len(prompts) != 1 or one.n != 1:
            raise InvalidRequestError(
                f"a stream has one sequence, not {len(prompts)} prompts with n = {one.n}"
            )
        [made] = self._make_all(prompts, one, priority, cache_salt, fill_context)
        return self._stream(made)

    def encode_chat(self, messages: SequenceOf[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation, ready for `generate` or `stream`."""
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer, so it can't chat")
        return self.tokenizer.encode_chat(list(messages), **template_options)

    def default_params(self) -> SamplingParams:
        """The parameters that an empty `SamplingParams()` stands for with this model."""
        return SamplingParams().resolve_defaults(self.model_info.generation_defaults)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes that no running request reads; returns the pages freed."""
        self._check_open()
        return self.scheduler.flush_cache()

    # -- life ------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and the KV cache; the instance can't be used any more."""
        if not self._closed:
            self._closed = True
            self._sequences.clear()
            self._built.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------

    def _make_all(
        self,
        prompts: SequenceOf[str | list[int]],
        params: Params,
        priority: int | SequenceOf[int],
        cache_salt: str | SequenceOf[str | None] | None,
        fill_context: bool,
    ) -> list[list[Req]]:
        """The requests of each prompt, all checked; none is queued yet."""
        self._check_open()
        count = len(prompts)
        options = zip(
            prompts,
            params_list(params, count),
            priorities(priority, count),
            cache_salts(cache_salt, count),
            strict=True,
        )
        made = []
        for index, (prompt, one, rank, salt) in enumerate(options):
            with naming_prompt(index, count):
                ids = self._builder.encode(prompt)
                self.scheduler.check(len(ids))
                rest = self.max_model_len - len(ids)
                complete = self._builder.params(one, rest if fill_context else 16)
                submit = self._builder.submit(self._next_uid, ids, complete, rank, salt)
                made.append(make_reqs(submit))
                self._next_uid += len(made[-1])
        return made

    def _run(
        self, prompts: SequenceOf[str | list[int]], made: list[list[Req]], use_tqdm: bool
    ) -> list[RequestOutput]:
        groups = [[Sequence.of(req, self.tokenizer) for req in group] for group in made]
        live = [sequence for group in groups for sequence in group]
        reqs = [req for group in made for req in group]
        try:
            self._submit(reqs, live)
            with catch_interrupts(), Progress(reqs, use_tqdm) as progress:
                for sequence in live:
                    while sequence.finish_reason is None:
                        self._step(progress)
        finally:
            self._forget(live)
        return [
            self._result(prompt, first, group)
            for prompt, (first, *_), group in zip(prompts, made, groups, strict=True)
        ]

    def _stream(self, reqs: list[Req]) -> Iterator[StreamChunk]:
        # Queued in here: a generator that is closed before its first chunk runs no `finally`.
        [sequence] = [Sequence.of(req, self.tokenizer) for req in reqs]
        try:
            self._submit(reqs, [sequence])
            while True:
                piece = sequence.take()
                if piece is not None:
                    yield StreamChunk(piece.text, piece.token_ids, piece.finish_reason)
                    if piece.finish_reason is not None:
                        return
                else:
                    self._step()
        finally:
            self._forget([sequence])

    def _submit(self, reqs: list[Req], sequences: list[Sequence]) -> None:
        self._check_open()
        with hold_interrupts():
            for req, sequence in zip(reqs, sequences, strict=True):
                self._sequences[req.uid] = sequence
                self.scheduler.add(req)

    def _step(self, progress: Progress | None = None) -> None:
        """One step of the scheduler, whoever's requests it runs."""
        self._check_open()
        if not self.scheduler.has_work:
            raise RuntimeError("A sequence has not ended, but the scheduler has no work")
        with hold_interrupts():
            updates = self.scheduler.step()
            for update in updates:
                sequence = self._sequences.get(update.uid)  # None: a forgotten stream's
                if sequence is not None and sequence.push(update):
                    self.scheduler.abort(update.uid, "stop")
            if progress is not None:  # last: its output may fail, and others' updates are in
                for update in updates:
                    progress.update(update)

    def _forget(self, sequences: list[Sequence]) -> None:
        with hold_interrupts():
            for sequence in sequences:
                if sequence.finish_reason is None:  # an interrupt or error: give the pages back
                    self.scheduler.abort(sequence.uid)
                self._sequences.pop(sequence.uid, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this LLM was closed: make a new one")

    def _result(self, prompt: str | list[int], first: Req, group: list[Sequence]) -> RequestOutput:
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *group[0].prompt_logprobs]
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=first.token_ids[: first.prompt_len],
            outputs=[sequence.output() for sequence in group],
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def engine_config(config: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    unknown = [name for name in config if name not in known]
    if unknown:
        raise ConfigError(f"The engine has no option {unknown[0]!r}; it takes: {', '.join(known)}")
    return EngineConfig(**config)
