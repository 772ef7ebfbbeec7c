"""Steps launched before the results of earlier ones are read give the same as one by one.

No scheduler: the requests are moved on by hand as it would, so that only the engine is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import pytest
import torch

from minisgl.core import Batch, Executor, PageWrites, PendingStep, Req, SamplingParams, StepOutput
from minisgl.engine import Engine
from minisgl.utils import div_ceil
from tests.helpers import TINY, make_engine, random_prompts, save, tiny_hf_model
from tests.late_executor import LateExecutor

STEPS, CHUNK, PAGE = 9, 6, 4
MIN_TOKENS = 4
EVEN = frozenset(range(0, TINY["vocab_size"], 2))
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=7, presence_penalty=1.5, frequency_penalty=0.5,
    repetition_penalty=1.3, min_tokens=MIN_TOKENS, max_tokens=40, logprobs=3, prompt_logprobs=2,
    logit_bias={5: 2.0},
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save(tiny_hf_model("qwen2"), tmp_path_factory.mktemp("overlap"))
    engine = make_engine(
        folder,
        dtype="float32",
        page_size=PAGE,
        num_pages=24,
        max_model_len=48,
        max_running_requests=3,
        threads=1,
    )
    yield engine
    engine.close()


def make_requests() -> list[Req]:
    """A greedy one whose prompt is one chunk, and a sampled one whose prompt takes three.

    Every even id is an EOS of the sampled one, so that `min_tokens` bans half of the vocabulary.
    """
    prompts = random_prompts([CHUNK, 2 * CHUNK + 3], TINY["vocab_size"], seed=1)
    return [
        Req(
            uid=row,
            token_ids=prompt,
            prompt_len=len(prompt),
            params=params.resolve_defaults({}),
            max_len=48,
            seed=7,
            eos_ids=EVEN,
            row=row,
        )
        for row, (prompt, params) in enumerate(zip(prompts, (GREEDY, SEEDED), strict=True))
    ]


def grow(executor: Executor, reqs: Sequence[Req], free: list[int]) -> None:
    """Give each request the pages for its next step."""
    writes = PageWrites([], [], [], [])
    for req in reqs:
        while len(req.pages) < div_ceil(req.device_len, PAGE):
            page = free.pop()
            writes.rows.append(req.row)
            writes.columns.append(len(req.pages))
            writes.pages.append(page)
            writes.fresh.append(page)
            req.pages.append(page)
    if writes.rows:
        executor.set_pages(writes)
    for part in writes:
        part.clear()  # an executor has taken what it needs


def run(executor: Executor, most_unread: int) -> tuple[list[Req], list[StepOutput]]:
    """`STEPS` steps of all requests, with up to so many launched and not read."""
    reqs, free, outputs = make_requests(), list(range(24)), []
    unread: deque[tuple[PendingStep, list[bool]]] = deque()

    def read() -> None:
        step, sampled = unread.popleft()
        outputs.append(step.result())
        for i, req in enumerate(reqs):
            req.num_in_flight -= 1
            req.num_prompt_logprobs += len(outputs[-1].prompt_logprobs[i])
            token = outputs[-1].token_ids[i]
            assert (token is not None) == sampled[i]
            if token is not None:
                req.num_pending -= 1
                req.token_ids.append(token)

    for req in reqs:
        executor.attach(req)
    for _ in range(STEPS):
        for req in reqs:
            req.device_len = min(req.cached_len + CHUNK, req.num_tokens)
        grow(executor, reqs, free)
        sampled = [req.samples for req in reqs]
        unread.append((executor.launch(Batch(reqs)), sampled))
        for req, samples in zip(reqs, sampled, strict=True):
            req.cached_len = req.device_len
            req.num_pending += samples
            req.num_in_flight += 1
        if len(unread) == most_unread:
            read()
    while unread:
        read()
    return reqs, outputs


@pytest.mark.parametrize("most_unread", [2, STEPS])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_overlapped_steps_equal_steps_read_one_by_one(
    engine: Engine, late: bool, most_unread: int
) -> None:
    plain, expected = run(engine, 1)
    executor = LateExecutor(engine) if late else engine
    reqs, outputs = run(executor, most_unread)
    assert outputs == expected
    assert [req.token_ids for req in reqs] == [req.token_ids for req in plain]
    if isinstance(executor, LateExecutor):
        assert executor.most_unread == most_unread


def test_the_features_compared_above_are_at_work(engine: Engine) -> None:
    (greedy, seeded), outputs = run(engine, 1)
    assert (greedy.num_output, seeded.num_output) == (STEPS, STEPS - 2)
    tokens = seeded.token_ids[seeded.prompt_len :]
    assert not EVEN & set(tokens[:MIN_TOKENS])
    assert EVEN & set(tokens[MIN_TOKENS:])
    assert seeded.num_prompt_logprobs == seeded.prompt_len - 1
    entries = [output.logprobs for output in outputs]
    assert [own is None for own, _ in entries] == [True] * STEPS
    assert [other is None for _, other in entries] == [True, True] + [False] * (STEPS - 2)
    assert any(other.rank > 1 for _, other in entries[2:])


def poison(engine: Engine) -> None:
    """What a page's former owner may have left behind: 0 * NaN is NaN, wherever it is read."""
    engine._pool.data[:, :, : engine._pool.dummy_page] = torch.nan


def test_fresh_pages_are_cleared(engine: Engine) -> None:
    # The shorter request's last page is read to its end beside the longer one, and masked.
    _, expected = run(engine, 1)
    poison(engine)
    _, outputs = run(engine, 1)
    assert outputs == expected


def test_other_pages_are_not_cleared(engine: Engine) -> None:
    poison(engine)
    first, second = (make_requests()[1] for _ in range(2))
    second.row = 2
    length, shared = first.prompt_len, 2  # the second request finds two of the four pages
    engine.attach(first)
    engine.set_pages(PageWrites([1] * 4, list(range(4)), [9, 3, 5, 0], fresh=[9, 3, 5, 0]))
    first.device_len = length
    expected = engine.launch(Batch([first])).result()
    engine.attach(second)
    engine.set_pages(PageWrites([2] * 4, list(range(4)), [9, 3, 6, 7], fresh=[6, 7]))
    second.cached_len, second.device_len = shared * PAGE, length
    output = engine.launch(Batch([second])).result()
    assert output.token_ids == expected.token_ids
    [ours], [theirs] = output.logprobs, expected.logprobs
    assert ours is not None and theirs is not None
    # The same sums over fewer rows at a time, in float32.
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_a_late_executor_wants_results_in_order_and_once(engine: Engine) -> None:
    executor, [req, _] = LateExecutor(engine), make_requests()
    executor.attach(req)
    req.device_len = PAGE
    grow(executor, [req], list(range(24)))
    first, second = (executor.launch(Batch([req])) for _ in range(2))
    with pytest.raises(AssertionError, match="in the order of the launches"):
        second.result()
    first.result()
    assert second.launched is None, "a later launch stays queued"
    with pytest.raises(AssertionError, match="in the order"):
        first.result()
    second.result()
    with pytest.raises(AssertionError, match="was read before"):
        second.result()


def test_what_a_late_executor_was_given_may_change(engine: Engine) -> None:
    _, expected = run(engine, 1)
    executor, reqs = LateExecutor(engine), make_requests()
    for req in reqs:
        executor.attach(req)
        req.device_len = CHUNK
    grow(executor, reqs, list(range(24)))
    step = executor.launch(Batch(reqs))
    for req in reqs:
        req.token_ids.clear()
        req.row = req.cached_len = req.device_len = -1
    assert step.result() == expected[0]
