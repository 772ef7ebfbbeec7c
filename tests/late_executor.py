"""An executor that imitates an asynchronous device at its slowest."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from minisgl.core import Batch, Executor, PageWrites, PendingStep, Req, StepOutput


class LateStep:
    """A step that is launched on the inner executor when its result is asked for."""

    def __init__(self, executor: LateExecutor, batch: Batch) -> None:
        self._executor = executor
        self._batch = batch
        self.launched: PendingStep | None = None

    def run(self, inner: Executor) -> None:
        self.launched = inner.launch(self._batch)

    def result(self) -> StepOutput:
        return self._executor.read(self)


class LateExecutor:
    """Does nothing until a step's result is asked for, then all that was asked up to that step.

    What was called is kept in one queue and run in its order, as a device with one stream would;
    launches after the step that is read stay in the queue. Like the driver, it takes what it
    is given when it is called: the tokens of an attached request and the page writes are copied,
    and of a batch the inner executor gets the arrays and those facts of its requests that never
    change. A request's lengths, or a token behind its prompt, can't be read late: they are not
    there. Results must be asked for in the order of the launches, each once.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._queue: deque[Callable[[Executor], None]] = deque()
        self._unread: deque[LateStep] = deque()
        self.most_unread = 0
        """How many launched steps were unread at once, at most; 2 where steps overlap."""

    def attach(self, req: Req) -> None:
        assert req.num_pending == 0, f"{req}: the host does not know all of its tokens"
        known = replace(req, token_ids=list(req.token_ids))
        self._queue.append(lambda inner: inner.attach(known))

    def set_pages(self, writes: PageWrites) -> None:
        assert len({len(writes.rows), len(writes.columns), len(writes.pages)}) == 1
        entries = list(zip(writes.rows, writes.columns, strict=True))
        assert len(set(entries)) == len(entries), "an entry is written twice: the order is open"
        assert set(writes.fresh) <= set(writes.pages)
        taken = PageWrites(*map(list, writes))
        self._queue.append(lambda inner: inner.set_pages(taken))

    def launch(self, batch: Batch) -> LateStep:
        taken = copy.copy(batch)
        taken.reqs = [_static_facts(req) for req in batch.reqs]
        step = LateStep(self, taken)
        self._queue.append(step.run)
        self._unread.append(step)
        self.most_unread = max(self.most_unread, len(self._unread))
        return step

    def read(self, step: LateStep) -> StepOutput:
        """Run the queue up to this step's launch, and give its result."""
        assert self._unread, "the result was read before"
        assert step is self._unread[0], "results are to be read in the order of the launches"
        self._unread.popleft()
        while step.launched is None:
            self._queue.popleft()(self._inner)
        return step.launched.result()

    def forget(self) -> None:
        """Run all that is queued; nobody will read it."""
        while self._unread:
            self.read(self._unread[0])


def _static_facts(req: Req) -> Req:
    """What an executor may ask of a request while the scheduler moves it on."""
    facts = SimpleNamespace(
        uid=req.uid,
        prompt_len=req.prompt_len,
        token_ids=tuple(req.token_ids[: req.prompt_len]),
        params=req.params,
        seed=req.seed,
        choice=req.choice,
        stop_ids=req.stop_ids,
        eos_ids=req.eos_ids,
        num_prompt_logprobs=req.num_prompt_logprobs,  # it may be read in `launch` itself
    )
    return facts  # type: ignore[return-value]
