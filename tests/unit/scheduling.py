"""Requests, a fake model and a scheduler around it, for tests of policy."""

from __future__ import annotations

from typing import NamedTuple

from minisgl.core import Executor, Req, SamplingParams
from minisgl.kvcache import CACHES, KVCache
from minisgl.scheduler import Limits, Scheduler, Update
from tests.late_executor import LateExecutor
from tests.unit.fake_executor import FakeExecutor, ReuseGuard

EOS = 1


def next_token(tokens: list[int]) -> int:
    """A deterministic 'model': the same tokens always continue the same way; EOS now and then."""
    return (sum(tokens) * 31 + len(tokens) * 7) % 23


def make_req(
    uid: int,
    prompt: list[int],
    max_tokens: int,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    **params,
) -> Req:
    complete = SamplingParams(temperature=0.0, **params).resolve_defaults({})
    return Req(
        uid=uid,
        token_ids=list(prompt),
        prompt_len=len(prompt),
        params=complete,
        max_len=len(prompt) + max_tokens,
        stop_ids=frozenset() if complete.ignore_eos else frozenset({EOS}),
        eos_ids=frozenset({EOS}),
        priority=priority,
        cache_salt=cache_salt,
    )


def expected_output(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class Made(NamedTuple):
    scheduler: Scheduler
    fake: FakeExecutor
    cache: KVCache
    guard: ReuseGuard


def make(
    num_pages: int = 64,
    page_size: int = 4,
    rows: int = 4,
    budget: int = 16,
    max_len: int = 128,
    *,
    cache: str = "radix",
    policy: str = "fcfs",
    overlap: bool = False,
) -> Made:
    """With `overlap`, the device computes nothing before a result is asked for."""
    fake = FakeExecutor(page_size, next_token)
    device: Executor = LateExecutor(fake) if overlap else fake
    pages = CACHES[cache](num_pages, page_size)
    guard = ReuseGuard(device, lambda page: page in set(pages.cached_pages()))
    limits = Limits(rows, budget, max_len)
    scheduler = Scheduler(guard, pages, limits, policy=policy, overlap=overlap)
    return Made(scheduler, fake, pages, guard)


def drain(scheduler: Scheduler, limit: int = 2000) -> list[Update]:
    """Step to the end, checking every page and row after each step."""
    updates: list[Update] = []
    for _ in range(limit):
        if not scheduler.has_work:
            return updates
        updates += scheduler.step()
        scheduler.check_integrity()
    raise AssertionError(f"still working after {limit} steps: livelock")


def outputs(updates: list[Update]) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for update in updates:
        result.setdefault(update.uid, [])
        if update.token_id is not None:
            result[update.uid].append(update.token_id)
    return result


def ends(updates: list[Update]) -> dict[int, str]:
    """The finish reason of each request; fails when one ended twice or went on afterwards."""
    result: dict[int, str] = {}
    for update in updates:
        assert update.uid not in result, f"{update} after the end"
        if update.finish_reason is not None:
            result[update.uid] = update.finish_reason
    return result
