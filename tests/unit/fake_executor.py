"""An executor without a model, which checks what the scheduler tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.core import Batch, Req, StepOutput


@dataclass
class Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class FakeExecutor:
    """Samples `next_token(tokens so far)` after checking rows, pages and lengths.

    It keeps what a device would: the tokens whose keys and values each slot holds, so that a
    request computed on another's pages, or on pages never written, fails the step.
    """

    def __init__(self, page_size: int, next_token: Callable[[list[int]], int]) -> None:
        self.page_size = page_size
        self.next_token = next_token
        self.tables: dict[int, dict[int, int]] = {}
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (position, token)
        self.tokens: dict[int, list[int]] = {}
        self.steps: list[list[tuple[int, int]]] = []

    def attach(self, req: Req) -> None:
        self.tokens[req.row] = list(req.token_ids)
        self.tables[req.row] = {}

    def set_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        self.tables[row].update(enumerate(pages, first))

    def launch(self, batch: Batch) -> Done:
        rows = [req.row for req in batch.reqs]
        assert len(set(rows)) == len(rows), "a row is twice in the batch"
        sampled: list[int | None] = []
        for req in batch.reqs:
            assert req.extend_len >= 1
            assert self.tokens[req.row][: req.device_len] == req.token_ids[: req.device_len]
            for position in range(req.cached_len, req.device_len):
                self.slots[self._slot(req.row, position)] = (position, req.token_ids[position])
        for req in batch.reqs:
            for position in range(req.device_len):
                held = self.slots.get(self._slot(req.row, position))
                assert held == (position, req.token_ids[position]), f"{req}: {position} is lost"
            sampled.append(self.next_token(req.token_ids) if req.samples else None)
            if sampled[-1] is not None:
                self.tokens[req.row].append(sampled[-1])
        self.steps.append([(req.uid, req.extend_len) for req in batch.reqs])
        size = batch.size
        return Done(StepOutput(sampled, [None] * size, [[] for _ in range(size)]))

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.page_size] * self.page_size + (
            position % self.page_size
        )
