"""A launch does not wait for the device, and a result waits for its own step only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine import Engine
from tests.by_hand import CHUNK, GREEDY, SEEDED, STEPS, grow, make_requests, run, tiny_engine

pytestmark = pytest.mark.gpu  # needs a CUDA device

CYCLES = 2_000_000_000
"""For `torch.cuda._sleep`: about a second, far more than a step of the tiny model takes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = tiny_engine(tmp_path_factory.mktemp("cuda"), device="cuda")
    run(engine, 1)  # kernels are loaded and buffers allocated, both of which synchronize
    yield engine
    engine.close()


def busy() -> Callable[[], bool]:
    """Keep the device busy; the function tells whether it still is."""
    torch.cuda._sleep(CYCLES)
    event = torch.cuda.Event()
    event.record()
    return lambda: not event.query()


def prefilled(engine: Engine, params: SamplingParams) -> list[Req]:
    """Two requests whose first token is sampled and not read."""
    reqs = make_requests()
    for req in reqs:
        req.params, req.device_len = params.resolve_defaults({}), req.prompt_len
        engine.attach(req)
    grow(engine, reqs, list(range(24)))
    engine.launch(Batch(reqs)).result()
    for req in reqs:
        req.cached_len, req.num_pending = req.prompt_len, 1
        req.device_len = req.num_tokens
    return reqs


@pytest.mark.parametrize("most_unread", [1, 2, STEPS])
def test_overlapped_steps_equal_the_cpus(engine: Engine, tmp_path: Path, most_unread: int) -> None:
    cpu = tiny_engine(tmp_path, device="cpu", threads=1)
    expected, _ = run(cpu, 1)
    cpu.close()
    reqs, outputs = run(engine, most_unread)
    assert [req.token_ids for req in reqs] == [req.token_ids for req in expected]
    assert outputs == run(engine, 1)[1]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_decode_is_launched_while_the_device_is_busy(
    engine: Engine, params: SamplingParams
) -> None:
    reqs = prefilled(engine, params)
    engine.launch(Batch(reqs)).result()  # the shapes of this step are seen once before
    torch.cuda.synchronize()
    still_busy = busy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grow(engine, reqs, [20, 21, 22, 23])
        step = engine.launch(Batch(reqs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_busy(), "the launch waited for the device"
    assert None not in step.result().token_ids
    assert not still_busy(), "the result was read before the step was done"


def test_a_prompt_is_launched_while_the_device_is_busy(engine: Engine) -> None:
    reqs = make_requests()
    still_busy = busy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for req in reqs:
            engine.attach(req)
            req.device_len = CHUNK
        grow(engine, reqs, list(range(24)))
        step = engine.launch(Batch(reqs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_busy(), "the launch waited for the device"
    assert [token is None for token in step.result().token_ids] == [False, True]


def test_a_result_does_not_wait_for_what_was_launched_later(engine: Engine) -> None:
    reqs = prefilled(engine, SEEDED)
    step = engine.launch(Batch(reqs))
    still_busy = busy()
    step.result()
    assert still_busy(), "the result waited for later work"
    torch.cuda.synchronize()
