"""Rank 0's scheduler when another rank fails: no token of a step that was cut off gets out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.errors import EngineDeadError
from minisgl.kvcache import CACHES
from minisgl.scheduler import Limits
from minisgl.scheduler.leading import LeadingScheduler
from minisgl.scheduler.ranks import Ranks
from tests.unit.fake_executor import FakeExecutor
from tests.unit.scheduling import make_req, next_token


class DyingRanks:
    """Ranks of which one is lost while a step runs."""

    def __init__(self) -> None:
        self.death: str | None = None
        self.sent: list[bytes] = []

    alike = Ranks.alike

    def send(self, commands: bytes) -> None:
        self.sent.append(commands)

    def failure(self, error: Exception | None = None) -> EngineDeadError:
        assert error is None
        return EngineDeadError(self.death)

    def _lost(self, why: str) -> None:
        self.death = why


def leading(ranks: Any, sample: Callable[[list[int]], int]) -> LeadingScheduler:
    cache = CACHES["naive"](16, 4)
    scheduler = LeadingScheduler(FakeExecutor(4, sample), cache, Limits(4, 16, 64), ranks)
    scheduler.add(make_req(1, [3, 4, 5], 9, ignore_eos=True))
    return scheduler


def test_what_an_aborted_collective_leaves_is_no_token() -> None:
    ranks: Any = DyingRanks()

    def sample(tokens: list[int]) -> int:
        if len(tokens) == 6:  # the collectives of this step are aborted, and end with anything
            ranks.death = "rank 1 was killed"
        return next_token(tokens)

    scheduler = leading(ranks, sample)
    tokens = [update.token_id for _ in range(3) for update in scheduler.step()]
    assert len(tokens) == len(ranks.sent) == 3
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        scheduler.step()


def test_a_step_that_is_interrupted_is_the_last_one() -> None:
    """The other ranks have made it, and what rank 0 has is anything."""
    ranks: Any = DyingRanks()

    def sample(tokens: list[int]) -> int:
        if len(tokens) == 5:
            raise KeyboardInterrupt
        return next_token(tokens)

    scheduler = leading(ranks, sample)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            scheduler.step()
    assert ranks.death == "rank 0 was interrupted in a step by KeyboardInterrupt"
