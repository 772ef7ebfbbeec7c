"""The life of requests: queued, planned into steps, launched, delivered, ended.

    waiting  --start: row, pages-->  running  --EOS, length, abort-->  ended
       ^                                |
       +------- retract: all pages -----+   (the latest in turn, when pages run out)

A device that computes while the host goes on gets its next step before the last one's tokens
are read (`overlap`); both loops decide from the same lengths:

    plain     plan 1  launch 1  deliver 1  plan 2  launch 2  deliver 2  ...
    overlap   plan 1  launch 1  plan 2  launch 2  deliver 1  plan 3  launch 3  deliver 2  ...
    device             [ step 1 ............ ][ step 2 ............ ][ step 3 ...

`launch` moves a request's lengths on at once; the token it samples is pending until `deliver`.
A request whose end is only seen then has one step too many in flight: what that samples is thrown
away, and its row and pages stay its own until that step is done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from minisgl.core import Batch, Executor, PendingStep, Req, StepOutput, TokenLogprobs
from minisgl.errors import InvalidRequestError
from minisgl.kvcache import KVCache
from minisgl.utils.logger import get_logger

from .planner import Limits, Plan, Planner, Stats
from .queue import WaitingQueue
from .running import RunningSet

if TYPE_CHECKING:  # it speaks in messages, which a scheduler alone does not need
    from .recorder import StepRecorder

__all__ = ["FinishReason", "Scheduler", "Update"]

logger = get_logger(__name__)

MAX_FAILED_LAUNCHES = 3
"""A launch that failed is tried again; after so many in a row its requests end in an error."""

FinishReason = Literal["stop", "length", "abort", "error"]


class Update(NamedTuple):
    """What a step changed for one request; the last one of a request has `finish_reason`."""

    uid: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class _Launched:
    reqs: list[Req]
    pending: PendingStep


class Scheduler:
    """Runs requests on an executor; every decision is a function of the calls made so far.

    So all ranks of a tensor-parallel group that make the same calls take the same decisions.
    """

    def __init__(
        self,
        executor: Executor,
        cache: KVCache,
        limits: Limits,
        *,
        policy: str = "fcfs",
        overlap: bool = False,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._limits = limits
        self._queue = WaitingQueue(policy)
        self._running = RunningSet(cache, limits.max_running_requests)
        self.stats = Stats()
        self.recorder: StepRecorder | None = None
        """Is told when each step begins and ends, where one is set."""
        self._planner = Planner(self._running, self._queue, limits, self.stats)
        self._most_ahead = 1 if overlap else 0
        self._in_flight: deque[_Launched] = deque()
        self._live: dict[int, Req] = {}  # those that have not ended, by uid
        self._num_added = 0
        self._ready: list[Update] = []  # not handed out yet
        self._is_stepping = False
        self._aborts: list[tuple[int, FinishReason]] = []  # asked for inside a step
        self._num_failed_launches = 0  # in a row

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._live or self._in_flight or self._ready)

    @property
    def num_running(self) -> int:
        """Requests that hold a row and pages and have not ended."""
        return len(self._running.reqs)

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither."""
        return len(self._queue)

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self._cache.num_pages

    @property
    def num_used_pages(self) -> int:
        """Pages that can't be had without ending a request: neither free nor only cached."""
        return self._cache.num_pages - self._cache.num_available_pages

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
        if req.uid in self._live:
            raise ValueError(f"A request with uid {req.uid} is already here")
        req.max_len = min(req.max_len, self._limits.max_model_len, self._cache.capacity_tokens)
        req.arrival = self._num_added
        self._num_added += 1
        self._live[req.uid] = req
        self._queue.add(req)

    def abort(self, uid: int, reason: FinishReason = "abort") -> bool:
        """End a request now, wherever it is; its terminal update comes with the next step.

        `reason` is `"stop"` when the front saw a stop string. False if no such request lives, that
        is, its end was told or is about to be. A call from inside a step (Python may finalize a
        client's stream anywhere) is heeded when the next one begins.
        """
        req = self._live.get(uid)
        if req is None:
            return False
        if self._is_stepping:
            self._aborts.append((uid, reason))
            return True
        if req.is_running:
            self._running.finish(req)
        else:
            self._queue.remove(req)
        self._tell_end(Update(uid, finish_reason=reason))
        return True

    def flush_cache(self) -> int:
        """Forget all cached prefixes that no running request reads; returns the pages freed.

        Steps in flight are read first: they may be all that holds the pages of ended requests.
        """
        while self._in_flight:
            self._settle()
        return self._cache.flush()

    def step(self) -> list[Update]:
        """Launch one batch, if there is one, and return what is known of the last ones."""
        aborts, self._aborts = self._aborts, []
        for uid, reason in aborts:
            self.abort(uid, reason)
        self._is_stepping = True
        try:
            self._step()
        finally:
            self._is_stepping = False
        # Taken last: a step that raises loses no request's end.
        updates, self._ready = self._ready, []
        if not self._running.holders():
            self._check_idle()
        return updates

    def close(self) -> None:
        """Nothing to end; a scheduler that leads other ranks ends them."""

    def check_integrity(self) -> None:
        """Raise unless every page and row has exactly one owner; looks at all of them."""
        self._running.check_integrity()

    def _step(self) -> None:
        while self._in_flight and self._planner.must_settle():
            self._settle()
        if self.recorder is not None:
            self.recorder.planning()
        plan = self._planner.plan(self.stats.num_steps)
        if plan.reqs:
            self._launch(plan)
        ahead = self._most_ahead if plan.reqs else 0
        while len(self._in_flight) > ahead:
            self._settle()

    def _check_idle(self) -> None:
        """Say so if pages were lost; requests can go on with those that are left."""
        try:
            self._cache.check_counts([])
        except RuntimeError as error:
            logger.error("%s", error)

    # -- launching -------------------------------------------------------------------------

    def _launch(self, plan: Plan) -> None:
        recorder = self.recorder
        try:
            if recorder is not None:
                recorder.launching()
            self._running.attach_to(self._executor)
            pending = self._executor.launch(Batch(plan.reqs))
            if recorder is not None:
                pending = recorder.launched(self.stats.num_steps + 1, plan, pending)
        except Exception:
            self._num_failed_launches += 1
            if self._num_failed_launches >= MAX_FAILED_LAUNCHES:
                self._give_up(plan.reqs)
            raise
        self._num_failed_launches = 0
        self._running.launched()
        self._in_flight.append(_Launched(plan.reqs, pending))
        for req in plan.reqs:
            if req.device_len == len(req.token_ids) + req.num_pending:
                req.num_pending += 1
            req.cached_len = req.device_len
            req.num_in_flight += 1
        for req in plan.reqs[plan.num_decodes :]:
            self._cache.publish(req)
        self.stats.num_steps += 1
        self.stats.num_decode_tokens += plan.num_decodes
        self.stats.num_prefill_tokens += plan.num_prefill_tokens

    def _give_up(self, reqs: list[Req]) -> None:
        """A launch failed again and again: perhaps for one of its requests, and others wait."""
        self._num_failed_launches = 0
        for req in reqs:
            self._running.finish(req)
            self._tell_end(Update(req.uid, finish_reason="error"))

    # -- taking results --------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for the oldest step in flight and take its result."""
        try:
            output = self._in_flight[0].pending.result()
        except BaseException:
            self._fail()
            raise
        self._deliver(self._in_flight.popleft().reqs, output)

    def _deliver(self, reqs: list[Req], output: StepOutput) -> None:
        nothing = [None] * len(reqs)
        entries, scores = output.logprobs or nothing, output.prompt_logprobs or nothing
        for req, token, entry, scored in zip(reqs, output.token_ids, entries, scores, strict=True):
            req.num_in_flight -= 1
            if token is not None:
                req.num_pending -= 1
            if req.finished:
                self.stats.num_discarded_tokens += token is not None
                if req.num_in_flight == 0:
                    self._running.close(req)
                continue
            if scored:
                req.num_prompt_logprobs += len(scored)
            if token is None:
                if scored:
                    self._ready.append(Update(req.uid, prompt_logprobs=scored))
                continue
            req.token_ids.append(token)
            reason = None  # asking first is cheaper than a call for each token
            if token in req.stop_ids or len(req.token_ids) >= req.max_len:
                reason = self._end_of(req, token)
            update = Update(req.uid, token, entry, scored, reason)
            if reason is None:
                self._ready.append(update)
            else:
                self._running.finish(req)
                self._tell_end(update)

    def _end_of(self, req: Req, token: int) -> FinishReason | None:
        if token in req.stop_ids and req.num_output >= req.params.min_tokens:
            return "stop"
        return "length" if len(req.token_ids) >= req.max_len else None

    def _tell_end(self, update: Update) -> None:
        self._live.pop(update.uid).finished = True
        self._ready.append(update)

    def _fail(self) -> None:
        """A step in flight was lost: end its requests, and trust nothing that it computed.

        Requests of no step in flight may have read pages that were to be written: they begin
        again.
        """
        lost = dict.fromkeys(req for step in self._in_flight for req in step.reqs)
        self._in_flight.clear()
        for req in lost:
            req.num_in_flight = req.num_pending = 0
            if req.finished:
                self._running.close(req)
            else:
                self._running.end(req)
                self._tell_end(Update(req.uid, finish_reason="error"))
        for req in list(self._running.reqs):
            self._planner.retract(req)
        self._cache.flush()  # nobody holds a page any more, so it forgets all
