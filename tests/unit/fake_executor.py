"""An executor without a model, which checks what the scheduler tells it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.core import (
    Batch,
    Executor,
    FinishedStep,
    PageWrites,
    PendingStep,
    Req,
    StepOutput,
    TokenLogprobs,
)
from tests.late_executor import LateExecutor


class FakeExecutor:
    """Samples `next_token(tokens so far)` after checking rows, pages and lengths.

    It keeps what a device would: the tokens of each row, and the tokens whose keys and values
    each slot holds, so that a request computed on another's pages, on pages never written or on
    cached pages of other tokens fails the step. Of the host it knows the batch's arrays only.
    """

    def __init__(self, page_size: int, next_token: Callable[[list[int]], int]) -> None:
        self.page_size = page_size
        self.next_token = next_token
        self.tables: dict[int, dict[int, int]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}  # slot -> all tokens up to the one in it
        self.tokens: dict[int, list[int]] = {}
        self.steps: list[list[tuple[int, int]]] = []

    def attach(self, req: Req) -> None:
        self.tokens[req.row] = list(req.token_ids)

    def set_pages(self, writes: PageWrites) -> None:
        for row, column, page in zip(writes.rows, writes.columns, writes.pages, strict=True):
            self.tables.setdefault(row, {})[column] = page
        for page in writes.fresh:
            for offset in range(self.page_size):
                self.slots.pop(page * self.page_size + offset, None)

    def launch(self, batch: Batch) -> FinishedStep:
        rows = batch.rows.tolist()
        assert len(set(rows)) == len(rows), "a row is twice in the batch"
        lengths = list(
            zip(
                rows,
                batch.cached_lens.tolist(),
                batch.device_lens.tolist(),
                batch.total_lens.tolist(),
                strict=True,
            )
        )
        for row, cached, device, total in lengths:
            assert cached < device <= total == len(self.tokens[row])
            for position in range(cached, device):
                tokens = tuple(self.tokens[row][: position + 1])
                self.slots[self._slot(row, position)] = tokens
        output = StepOutput([], prompt_logprobs=[])
        for req, (row, cached, device, total) in zip(batch.reqs, lengths, strict=True):
            for position in range(device):
                held = self.slots.get(self._slot(row, position))
                wanted = tuple(self.tokens[row][: position + 1])
                assert held == wanted, f"request {req.uid}: {position} is lost"
            sampled = self.next_token(self.tokens[row]) if device == total else None
            output.token_ids.append(sampled)
            if sampled is not None:
                self.tokens[row].append(sampled)
            output.prompt_logprobs.append(self._scored(req, cached, device))
        uids = [req.uid for req in batch.reqs]
        self.steps.append(list(zip(uids, batch.extend_lens.tolist(), strict=True)))
        return FinishedStep(output)

    def _scored(self, req: Req, cached: int, device: int) -> list[TokenLogprobs]:
        """Entries that say only which prompt tokens a model would have scored."""
        if req.params.prompt_logprobs is None:
            return []
        first = max(cached, req.num_prompt_logprobs)
        places = range(first, min(device, req.prompt_len - 1))
        return [TokenLogprobs(req.token_ids[p + 1], 0.0, p + 1, ()) for p in places]

    def _slot(self, row: int, position: int) -> int:
        page = self.tables[row][position // self.page_size]
        return page * self.page_size + position % self.page_size


class ReuseGuard:
    """Fails when a row or page gets a new owner while a step whose result was not read uses it.

    Also when a page neither comes from the prefix cache (`is_cached`) nor is cleared. Steps must
    be read in the order of their launches, each once.
    """

    def __init__(self, inner: Executor, is_cached: Callable[[int], bool]) -> None:
        self._inner = inner
        self._is_cached = is_cached
        self._tables: dict[int, dict[int, int]] = {}
        self._unread: deque[tuple[set[int], set[int]]] = deque()  # rows, pages of each step
        self.most_unread = 0

    def attach(self, req: Req) -> None:
        assert not any(req.row in rows for rows, _ in self._unread), f"row {req.row} is in use"
        self._tables[req.row] = {}
        self._inner.attach(req)

    def set_pages(self, writes: PageWrites) -> None:
        fresh = set(writes.fresh)
        assert not any(pages & fresh for _, pages in self._unread), "a page is in use"
        for page in set(writes.pages) - fresh:
            assert self._is_cached(page), f"page {page} is not cleared for its new owner"
        for row, column, page in zip(writes.rows, writes.columns, writes.pages, strict=True):
            known = self._tables[row].get(column, page)  # after a failed launch it comes again
            assert known == page, "a page of a running request is replaced"
            self._tables[row][column] = page
        self._inner.set_pages(writes)

    def launch(self, batch: Batch) -> PendingStep:
        rows = set(batch.rows.tolist())
        self._unread.append((rows, {p for row in rows for p in self._tables[row].values()}))
        self.most_unread = max(self.most_unread, len(self._unread))
        step = self._inner.launch(batch)
        return _Guarded(step, self._unread)

    def forget(self) -> None:
        """Nobody will read the results of the steps in flight."""
        self._unread.clear()
        if isinstance(self._inner, LateExecutor):
            self._inner.forget()


@dataclass
class _Guarded:
    step: PendingStep
    unread: deque[tuple[set[int], set[int]]]

    def result(self) -> StepOutput:
        output = self.step.result()
        self.unread.popleft()
        return output
