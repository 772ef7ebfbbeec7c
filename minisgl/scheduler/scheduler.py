"""Continuous batching with chunked prefill, admission by need, and retraction.

    waiting  --admit: row, pages-->  running  --EOS, length, abort-->  ended
       ^                                |
       +------- retract: all pages -----+   (the latest-come, when pages run out)

A step computes one token for each request that decodes and prefill chunks with what is left
of the token budget. A request is a prefill as long as more than one of its tokens lacks keys
and values, also when it was retracted and its own output is computed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from minisgl.core import Batch, Executor, Req, StepOutput, TokenLogprobs
from minisgl.errors import InvalidRequestError
from minisgl.kvcache import NaiveCache
from minisgl.utils import div_ceil

__all__ = ["FinishReason", "Limits", "Scheduler", "Update"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Limits:
    """What the scheduler must keep to."""

    max_running_requests: int
    """Rows of the page table."""
    token_budget: int
    """Tokens of a step, decoding included; not below `max_running_requests`."""
    max_model_len: int
    """Longest prompt plus output."""


@dataclass(frozen=True)
class Update:
    """What a step changed for one request; the last one of a request has `finish_reason`."""

    uid: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Scheduler:
    """Decides each step's batch from the queues; all decisions iterate in arrival order."""

    def __init__(self, executor: Executor, cache: NaiveCache, limits: Limits) -> None:
        if limits.token_budget < limits.max_running_requests:
            raise ValueError(
                f"token budget {limits.token_budget} is below the "
                f"{limits.max_running_requests} requests that may decode in a step"
            )
        self._executor = executor
        self._cache = cache
        self._limits = limits
        self._waiting: deque[Req] = deque()
        self._running: list[Req] = []  # in order of arrival
        self._free_rows = list(range(limits.max_running_requests - 1, -1, -1))
        self._ready: list[Update] = []  # terminal updates of aborts, for the next step
        self.num_retractions = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._running or self._waiting or self._ready)

    @property
    def num_running(self) -> int:
        """Requests that hold a row and pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither."""
        return len(self._waiting)

    def check(self, prompt_len: int) -> None:
        """Raise `InvalidRequestError` for a prompt that no state of the queues could serve."""
        limit = min(self._limits.max_model_len, self._cache.capacity_tokens)
        if prompt_len < 1:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if prompt_len + 1 > limit:
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; with one more to generate that exceeds "
                f"the longest sequence of {limit} (--max-model-len {self._limits.max_model_len}, "
                f"KV cache of {self._cache.capacity_tokens} tokens)",
                param="prompt",
            )

    def add(self, req: Req) -> None:
        """Queue a request; its `max_len` is clipped to what fits."""
        self.check(len(req.token_ids))
        req.max_len = min(req.max_len, self._limits.max_model_len, self._cache.capacity_tokens)
        self._waiting.append(req)

    def abort(self, uid: int, reason: FinishReason = "abort") -> bool:
        """End a request now, queued or running; its terminal update comes with the next step.

        `reason` is `"stop"` when the front saw a stop string. False if no such request lives.
        """
        for req in self._running:
            if req.uid == uid:
                self._release(req)
                self._ready.append(Update(uid, finish_reason=reason))
                return True
        for req in self._waiting:
            if req.uid == uid:
                self._waiting.remove(req)
                self._ready.append(Update(uid, finish_reason=reason))
                return True
        return False

    def step(self) -> list[Update]:
        """Compute one batch, if there is one, and return what changed."""
        reqs = self._schedule()
        delivered: list[Update] = []
        if reqs:
            output = self._executor.launch(Batch(reqs)).result()
            delivered = self._deliver(reqs, output)
        if not self._running:
            self.check_integrity()
        # Taken last: a step that raises loses no request's end.
        updates, self._ready = self._ready + delivered, []
        return updates

    def check_integrity(self) -> None:
        """Raise unless every page and row is free or belongs to exactly one running request."""
        self._cache.check_integrity(self._running)
        rows = sorted([req.row for req in self._running] + self._free_rows)
        if rows != list(range(self._limits.max_running_requests)):
            raise RuntimeError(f"Rows lost or shared: {rows} of {self._limits}")

    # -- choosing the batch ----------------------------------------------------------------

    def _schedule(self) -> list[Req]:
        """The step's requests, each with `device_len` set and pages up to it.

        Requests are visited from the earliest-come to the latest; a victim of retraction is
        always the latest, so it was not visited yet and nothing chosen is undone.
        """
        chosen: list[Req] = []
        visited = 0
        while visited < len(self._running):  # retraction shortens the list at its end
            req = self._running[visited]
            visited += 1
            if _missing(req) == 1 and self._grow_or_retract(req):
                req.device_len = req.cached_len + 1
                chosen.append(req)
        budget = self._limits.token_budget - len(chosen)
        for req in self._running:
            if _missing(req) > 1:
                budget -= self._take_chunk(req, budget, chosen)
        while self._waiting and budget > 0 and self._admissible(self._waiting[0]):
            req = self._waiting.popleft()
            self._admit(req)
            budget -= self._take_chunk(req, budget, chosen)
        return chosen

    def _grow_or_retract(self, req: Req) -> bool:
        """Pages for one more token; False when the request itself had to be retracted."""
        while not self._grow(req, req.cached_len + 1):
            victim = self._running[-1]
            self._retract(victim)
            if victim is req:
                return False
        return True

    def _take_chunk(self, req: Req, budget: int, chosen: list[Req]) -> int:
        """Give a prefill what budget and free pages allow; returns the tokens taken."""
        room = self._cache.room_for(req) - req.cached_len
        chunk = min(_missing(req), budget, room)
        if chunk <= 0:
            return 0
        self._grow(req, req.cached_len + chunk)
        req.device_len = req.cached_len + chunk
        chosen.append(req)
        return chunk

    def _admissible(self, req: Req) -> bool:
        """Whether a row is free, and pages for all known tokens of this request and one more,
        besides what the running prefills still need: less would be retracted at once."""
        if not self._free_rows:
            return False
        needed = sum(self._missing_pages(r) for r in self._running if _missing(r) > 1)
        return self._missing_pages(req) + needed <= self._cache.num_free_pages

    def _missing_pages(self, req: Req) -> int:
        length = min(len(req.token_ids) + 1, req.max_len)
        return max(0, div_ceil(length, self._cache.page_size) - len(req.pages))

    def _admit(self, req: Req) -> None:
        req.row = self._free_rows.pop()
        req.cached_len = req.device_len = self._cache.begin(req)
        self._executor.attach(req)
        self._running.append(req)

    def _retract(self, req: Req) -> None:
        """Back to the head of the queue; its tokens stay, their keys and values are redone."""
        self._release(req)
        self._waiting.appendleft(req)
        self.num_retractions += 1

    def _grow(self, req: Req, length: int) -> bool:
        first = len(req.pages)
        pages = self._cache.grow(req, length)
        if pages:
            self._executor.set_pages(req.row, first, pages)
        return pages is not None

    def _release(self, req: Req) -> None:
        self._cache.end(req)
        self._running.remove(req)
        self._free_rows.append(req.row)
        req.row, req.cached_len, req.device_len = -1, 0, 0

    # -- taking the result -----------------------------------------------------------------

    def _deliver(self, reqs: list[Req], output: StepOutput) -> list[Update]:
        updates: list[Update] = []
        for i, req in enumerate(reqs):
            req.cached_len = req.device_len
            prompt_logprobs = output.prompt_logprobs[i]
            req.num_prompt_logprobs += len(prompt_logprobs)
            token = output.token_ids[i]
            if token is None:
                if prompt_logprobs:
                    updates.append(Update(req.uid, prompt_logprobs=prompt_logprobs))
                continue
            req.token_ids.append(token)
            reason: FinishReason | None = None
            if token in req.stop_ids and req.num_output >= req.params.min_tokens:
                reason = "stop"
            elif len(req.token_ids) >= req.max_len:
                reason = "length"
            updates.append(Update(req.uid, token, output.logprobs[i], prompt_logprobs, reason))
            if reason is not None:
                self._release(req)
        return updates


def _missing(req: Req) -> int:
    """Known tokens without keys and values."""
    return len(req.token_ids) - req.cached_len
