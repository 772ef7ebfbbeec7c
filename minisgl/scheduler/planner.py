"""What the next step computes: decodes, then prefill chunks, then requests that start.

A request decodes when exactly one of its tokens lacks keys and values; else it is a prefill, also
when it was retracted and its own output is computed again. Decodes never wait. What they leave of
the token budget goes to running prefills and then to waiting requests, so that a long prompt and
many short ones share a step.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from minisgl.core import Req

from .queue import WaitingQueue
from .running import RunningSet

__all__ = ["Limits", "Plan", "Planner", "Stats"]


@dataclass(frozen=True)
class Limits:
    """What the scheduler must keep to."""

    max_running_requests: int
    """Rows of the page table."""
    token_budget: int
    """Tokens of a step, decoding included; not below `max_running_requests`."""
    max_model_len: int
    """Longest prompt plus output."""

    def __post_init__(self) -> None:
        if self.token_budget < self.max_running_requests:
            raise ValueError(
                f"token budget {self.token_budget} is below the "
                f"{self.max_running_requests} requests that may decode in a step"
            )


@dataclass
class Stats:
    """Counts since the scheduler was made."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    """Tokens of prompts, and of what retracted requests compute again."""
    num_decode_tokens: int = 0
    """Of requests that lacked one token; the last one of a prompt's chunks may be among them."""
    num_queried_tokens: int = 0
    """Tokens of the requests that started; retracted ones start again."""
    num_hit_tokens: int = 0
    """Tokens read from the prefix cache instead of computed."""
    num_retractions: int = 0
    num_discarded_tokens: int = 0
    """Sampled for requests that had ended: the price of overlap."""


@dataclass
class Plan:
    """The requests of the step, each with `device_len` set and pages up to it."""

    budget: int
    """Tokens that may still be added."""
    reqs: list[Req] = field(default_factory=list)
    num_decodes: int = 0
    """The first of `reqs` decode, one token each; the rest are prefill chunks."""
    num_prefill_tokens: int = 0
    computing: set[Hashable] = field(default_factory=set)
    """Pages that this step's prefills compute next (see `KVCache.next_page`)."""
    reserved_pages: int = 0
    """Pages that running prefills still need to reach their first output token."""


class Planner:
    """Moves requests between the queue and the running set, and fills steps."""

    def __init__(
        self, running: RunningSet, queue: WaitingQueue, limits: Limits, stats: Stats
    ) -> None:
        self._running = running
        self._cache = running.cache
        self._queue = queue
        self._limits = limits
        self._stats = stats

    def must_settle(self) -> bool:
        """Whether decodes need more pages than are left, so that some must be retracted.

        A step in flight writes to its requests' pages, so its result is taken before that; it
        may also end requests, and then nobody is retracted.
        """
        reqs, left = self._running.reqs, self._cache.num_available_pages
        if left >= len(reqs):
            return False
        page_size = self._cache.page_size
        return left < sum(
            1
            for req in reqs
            if req.cached_len + 1 == req.num_tokens < req.max_len
            and req.cached_len == len(req.pages) * page_size
        )

    def plan(self, step: int) -> Plan:
        """Choose the requests of step number `step`; what they need of rows and pages is theirs."""
        plan = Plan(self._limits.token_budget)
        prefills = self._plan_decodes(plan)
        for req in prefills:
            self._take_chunk(req, plan)
            plan.reserved_pages += self._missing_pages(req)
        self._start_waiting(plan, step)
        return plan

    def _plan_decodes(self, plan: Plan) -> list[Req]:
        """One token for each request that decodes, in turn; returns those that don't.

        The victim of a retraction is always the latest in turn, so it was not visited yet, or not
        planned, and nothing planned is undone.
        """
        reqs, chosen, page_size = self._running.reqs, plan.reqs, self._cache.page_size
        prefills: list[Req] = []
        visited = 0
        while visited < len(reqs):  # retraction shortens the list at its end
            req = reqs[visited]
            visited += 1
            length = req.cached_len + 1
            total = len(req.token_ids) + req.num_pending  # a property would show in the step's cost
            if length < total:
                prefills.append(req)
                continue
            if total >= req.max_len:  # its last token is in flight
                continue
            if length > len(req.pages) * page_size and not self._grow_or_retract(req, length):
                continue
            req.device_len = length
            chosen.append(req)
        plan.num_decodes = len(chosen)
        plan.budget -= len(chosen)
        return prefills

    def _start_waiting(self, plan: Plan, step: int) -> None:
        """Start waiting requests while budget, rows and pages last.

        One starts if there are pages for all of its known tokens and one more, besides what
        running prefills need and one page for every other request to decode into: with less,
        it or another would be retracted soon. One whose next page is computed in this step is
        passed over, to read that page in the next; for want of pages nobody passes another.
        """
        if plan.budget <= 0 or not self._running.has_free_row:
            return
        most = self._limits.max_running_requests
        for req in self._queue.candidates(self._cache, step, most):
            if plan.budget <= 0 or not self._running.has_free_row:
                return
            match = self._cache.match(req)
            if self._cache.awaits(req, match, plan.computing):
                continue
            cached = match.num_tokens // self._cache.page_size
            own = self._missing_pages(req) - cached + match.num_unlocked_pages
            others = plan.reserved_pages + len(self._running.reqs)
            if own + others > self._cache.num_available_pages:
                return
            self._queue.remove(req)
            self._running.start(req)
            self._stats.num_queried_tokens += len(req.token_ids)
            self._stats.num_hit_tokens += match.num_tokens
            if not req.retracted:  # else it may read what it computed itself
                req.num_cached_tokens = match.num_tokens
                req.started_s = time.monotonic()
            self._take_chunk(req, plan)
            plan.reserved_pages += self._missing_pages(req)

    def _take_chunk(self, req: Req, plan: Plan) -> None:
        """Give a prefill what budget and pages allow, cut at a page's end where it can be."""
        cache, start = self._cache, req.cached_len
        end = min(req.num_tokens, start + plan.budget, cache.room_for(req))
        if end < req.num_tokens and end - end % cache.page_size > start:
            end -= end % cache.page_size
        if end <= start:
            return
        self._running.grow(req, end)
        req.device_len = end
        plan.reqs.append(req)
        plan.budget -= end - start
        plan.num_prefill_tokens += end - start
        page = cache.next_page(req)
        if page is not None:
            plan.computing.add(page)

    def _grow_or_retract(self, req: Req, length: int) -> bool:
        """A page for the next token; False when the request itself had to be retracted."""
        self._cache.publish(req)  # its last page is full
        while not self._running.grow(req, length):
            victim = self._running.reqs[-1]
            self.retract(victim)
            if victim is req:
                return False
        return True

    def retract(self, req: Req) -> None:
        """Back to the queue with its tokens; what it computed stays cached while there is room."""
        self._running.end(req)
        req.retracted = True
        self._queue.add(req)
        self._stats.num_retractions += 1

    def _missing_pages(self, req: Req) -> int:
        """Pages to hold all known tokens and one more."""
        return self._cache.missing_pages(req, req.num_tokens + 1)
