"""What must hold of a request before any of it is sent: all is found out first.

The checks are made in the event loop's thread, so each is cheap however large the request is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from minisgl.core import SamplingParams
from minisgl.errors import BusyError, InvalidRequestError
from minisgl.llm.requests import RequestBuilder, cache_salts, params_list, priorities
from minisgl.message import EngineReady, Submit

__all__ = ["Admission"]


@dataclass(frozen=True)
class Admission:
    """Checks requests against the model and the engine, and makes their messages."""

    ready: EngineReady
    builder: RequestBuilder
    max_queued: int
    """Sequences that may wait beyond those that may run."""
    uids: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)
    """Gives the next one."""

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that is taken: one more is generated at least."""
        return min(self.ready.max_model_len, self.ready.capacity_tokens) - 1

    def check_length(self, length: int, known: str = "the prompt has") -> None:
        """Of a prompt, in tokens."""
        if length < 1:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        if length > self.max_prompt_len:
            raise InvalidRequestError(
                f"{known} {length} tokens; with one more to generate that exceeds the "
                f"longest sequence of {self.max_prompt_len + 1} (max_model_len "
                f"{self.ready.max_model_len}, KV cache of {self.ready.capacity_tokens} tokens)",
                "prompt",
            )

    def check_text(self, text: str) -> None:
        """Refuse one that is certainly too long, before a tokenizer spends seconds on it."""
        tokenizer = self.builder.tokenizer
        bound = None if tokenizer is None else tokenizer.text_bound
        if bound is not None and len(text) > self.max_prompt_len:
            least = max(1, bound.least_tokens(text))
            self.check_length(least, f"the prompt has {len(text)} characters, which is at least")

    def check_count(self, count: int, param: str) -> None:
        """Refuse, naming `param`, more sequences than can ever be there at once."""
        running = self.ready.max_running_requests
        if count > running + self.max_queued:
            raise InvalidRequestError(
                f"{count} sequences were asked for in one request; at most {running} may run "
                f"(--max-running-requests) and {self.max_queued} wait (--max-queued-requests): "
                "send several requests",
                param,
            )

    def check_room(self, count: int, num_live: int) -> None:
        """Raise `BusyError` if so many more sequences can't be taken now."""
        running = self.ready.max_running_requests
        if count > running + self.max_queued - num_live:
            raise BusyError(
                f"{num_live} sequences are running or queued and {count} more were asked for; "
                f"at most {running} may run and {self.max_queued} wait "
                "(--max-queued-requests): try again later"
            )

    def complete(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        fill_context: bool,
    ) -> list[SamplingParams]:
        """Each prompt's parameters with the model's defaults; those that are the same, once."""
        complete: list[SamplingParams] = []
        known: dict[tuple[int, int], SamplingParams] = {}
        for ids, one in zip(prompts, params_list(params, len(prompts)), strict=True):
            self.check_length(len(ids))
            key = (id(one), self.max_prompt_len + 1 - len(ids) if fill_context else 16)
            if key not in known:
                known[key] = self.builder.params(one, key[1])
            complete.append(known[key])
        return complete

    def messages(
        self,
        prompts: list[list[int]],
        complete: list[SamplingParams],
        priority: int,
        cache_salt: str | None,
    ) -> list[Submit]:
        """What to send for each prompt, with uids of its own; it is certain that it can be."""
        [rank], [salt] = priorities(priority, 1), cache_salts(cache_salt, 1)
        messages = []
        for ids, one in zip(prompts, complete, strict=True):
            first, *_ = [self.uids() for _ in range(one.n)]
            messages.append(self.builder.submit(first, ids, one, rank, salt))
        try:
            for message in messages:
                msgspec.msgpack.encode(message)
        except (TypeError, ValueError, OverflowError) as error:  # numbers of NumPy's, for instance
            raise InvalidRequestError(
                f"the prompt's token ids or its parameters are not plain numbers: {error}", "prompt"
            ) from error
        return messages
