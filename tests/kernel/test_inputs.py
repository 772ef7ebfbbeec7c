"""A step's inputs made on the device, against those that the reference makes on the host's word.

Everything is an integer, so it is compared exactly.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine.inputs import fill_batch
from minisgl.kernel.triton.inputs import fill_inputs, plan_prefill, receive, scatter
from minisgl.kernel.triton.prefill import PrefillPlan

from .conftest import DEVICE

GARBAGE = 1 << 30
"""What the device holds behind a step's numbers: those of an earlier one."""
UNTOUCHED = -7
LENGTH = 700
"""Longest request."""


def ints(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


class Step(NamedTuple):
    """A batch, and the numbers that the device is sent of it."""

    batch: Batch
    counts: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    cached: torch.Tensor


def make_step(lengths: list[tuple[int, int]], surplus: int, rows: list[int]) -> Step:
    """Requests of `(cached tokens, tokens of this step)`, and so many places more."""
    params = SamplingParams().resolve_defaults({})
    reqs = [
        Req(
            uid=i, token_ids=[], prompt_len=0, params=params, max_len=LENGTH,
            row=rows[i], cached_len=cached, device_len=cached + extend,
        )
        for i, (cached, extend) in enumerate(lengths)
    ]  # fmt: skip
    batch, beyond = Batch(reqs), [GARBAGE] * surplus
    ends = batch.extend_lens.cumsum().tolist()
    num_decodes = next((i for i, n in enumerate(batch.extend_lens) if n > 1), batch.size)
    return Step(
        batch,
        ints([num_decodes, batch.size, ends[-1], GARBAGE]),
        ints([req.row for req in reqs] + beyond),
        ints([0, *ends] + beyond),
        ints([req.cached_len for req in reqs] + beyond),
    )


def make_tables(num_rows: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token pool and page table of which no two entries are equal."""
    width = -(-LENGTH // page_size)
    tokens = torch.randperm(num_rows * (LENGTH + 1)).int().view(num_rows, LENGTH + 1)
    pages = torch.randperm(num_rows * width).int().view(num_rows, width)
    return tokens.to(DEVICE), pages.to(DEVICE)


def check_inputs(step: Step, num_rows: int, page_size: int, padding: int) -> None:
    """The step's tokens are the reference's, and `padding` more are harmless."""
    token_pool, page_table = make_tables(num_rows, page_size)
    fill_batch(step.batch, token_pool, page_table, page_size)
    num_tokens, places = step.batch.num_tokens, len(step.rows)
    room = torch.full((3, num_tokens + padding), UNTOUCHED, device=DEVICE)
    last = torch.full((places,), UNTOUCHED, device=DEVICE)
    dummy = page_table.numel()
    fill_inputs(
        step.counts, step.rows, step.starts, step.cached, token_pool, page_table, page_size, dummy,
        (*room, last),
    )  # fmt: skip
    expected = torch.stack((step.batch.input_ids, step.batch.positions, step.batch.out_loc))
    assert torch.equal(room[:, :num_tokens], expected)
    assert room[:, num_tokens:].T.tolist() == [[0, 0, dummy * page_size]] * padding
    ends = step.batch.extend_lens.cumsum() - 1
    assert last.tolist() == ends.tolist() + [0] * (places - step.batch.size)


ONE_TOKEN = st.tuples(st.integers(0, 300), st.just(1))
CHUNK = st.tuples(st.integers(0, 300), st.integers(1, 200))


@given(
    st.lists(ONE_TOKEN, max_size=6),
    st.lists(CHUNK, max_size=6),
    st.sampled_from([0, 1, 30]),
    st.sampled_from([0, 1, 300]),
    st.sampled_from([1, 3, 16]),
    st.randoms(use_true_random=False),
)
@example([(0, 1)], [], 0, 0, 16, random.Random(0))  # one token of one request
@example([], [(0, 1), (0, 2)], 0, 0, 16, random.Random(0))
@example([], [(300, 256)], 0, 0, 16, random.Random(0))  # a whole number of blocks
@example([], [(0, LENGTH)], 0, 0, 1, random.Random(0))  # the longest request
@example([(5, 1)], [], 300, 3, 16, random.Random(0))  # more places than tokens
def test_inputs(decodes, chunks, surplus, padding, page_size, rng) -> None:
    lengths = decodes + chunks
    if lengths:
        rows = rng.sample(range(16), len(lengths))
        check_inputs(make_step(lengths, surplus, rows), 16, page_size, padding)


@pytest.mark.parametrize("count", [255, 256, 257])
def test_as_many_requests_as_there_can_be(count) -> None:
    lengths = [(i % 600, 1) for i in range(count - 1)] + [(3, 20)]
    rows = torch.randperm(count).tolist()
    check_inputs(make_step(lengths, 0, rows), count, 16, 0)


@given(
    st.lists(ONE_TOKEN, max_size=6),
    st.lists(CHUNK, max_size=6),
    st.sampled_from([0, 1, 30]),
    st.sampled_from([7, 16, 25]),
)
@example([(9, 1)], [], 3, 16)  # nothing to plan
@example([(9, 1)], [(0, 16), (9, 1), (0, 17)], 0, 16)  # a chunk of one token does not decode
@example([], [(0, LENGTH)], 0, 7)  # a whole number of blocks
def test_prefill_plan(decodes, chunks, surplus, block) -> None:
    lengths = decodes + chunks
    if not lengths:
        return
    step = make_step(lengths, surplus, [*range(len(lengths))])
    expected = [
        [b, first]
        for b, (_, extend) in enumerate(lengths)
        if b >= step.counts[0]
        for first in range(0, extend, block)
    ]
    room = step.batch.num_tokens // block + len(step.rows)  # as the backend reckons, or less
    assert len(expected) <= room
    items = torch.full((room, 2), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(items, ints([GARBAGE]), step.rows, step.starts, step.cached)
    plan_prefill(step.counts, plan, block)
    assert plan.num_items.tolist() == [len(expected)]
    assert items.tolist() == expected + [[UNTOUCHED] * 2] * (room - len(expected))


def make_writes(table: torch.Tensor, count: int) -> torch.Tensor:
    """Rows, columns and values of `count` places of a table, in random order: `[3, count]`."""
    height, width = table.shape
    places = torch.randperm(height * width)[:count]
    return torch.stack((places // width, places % width, 10_000 + torch.arange(count)))


def make_table() -> tuple[torch.Tensor, torch.Tensor]:
    """A table that is part of a wider one, and that one."""
    wide = torch.arange(60 * 17, dtype=torch.int32, device=DEVICE).view(60, 17)
    return wide[:, :11], wide


@pytest.mark.parametrize(
    ("places", "dtype"),
    [(torch.int32, torch.int32), (torch.int32, torch.int64), (torch.int64, torch.int64)],
)
@pytest.mark.parametrize("count", [0, 1, 3, 256, 600])
def test_scatter(count, places, dtype) -> None:
    """Rows and columns are parts of one array, which begin at any address."""
    table, wide = make_table()
    rows, columns, values = make_writes(table, count).to(DEVICE, places).unbind()
    values = values.to(dtype)
    expected = wide.clone()
    expected[rows.long(), columns.long()] = values.int()
    scatter(table, rows, columns, values)
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("num_writes", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("size", [28, 256, 300])
def test_receive(size, num_writes) -> None:
    """What lies behind the writes in the staged memory is an earlier step's."""
    table, wide = make_table()
    writes, numbers = make_writes(table, num_writes), torch.randint(1000, (size,))
    staged = torch.cat((numbers, writes.flatten(), torch.full((600,), GARBAGE))).int()
    if DEVICE.type == "cuda":
        staged = staged.pin_memory()
    expected = wide.clone()
    expected[tuple(writes[:2].to(DEVICE))] = writes[2].int().to(DEVICE)
    room = torch.full((size + 5,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    receive(staged, room[:size], table, num_writes)
    assert room.tolist() == numbers.tolist() + [UNTOUCHED] * 5
    assert torch.equal(wide, expected)


def test_refuses_what_it_cannot_read() -> None:
    step = make_step([(5, 1), (0, 3)], 0, [0, 1])
    tokens, pages = make_tables(2, 16)
    room = torch.zeros((4, 8), dtype=torch.int64, device=DEVICE)
    items = torch.zeros((3, 2), dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(items, ints([0]), step.rows, step.starts, step.cached)
    staged, writes = ints([0] * 10), ints([0] * 6)

    def fill(counts=step.counts, cached=step.cached, pages=pages, out=room) -> None:
        fill_inputs(counts, step.rows, step.starts, cached, tokens, pages, 16, 0, (*out,))

    def write(values: torch.Tensor) -> None:
        scatter(pages, writes[:2], writes[2:4], values)

    for call, message in {
        lambda: fill(counts=step.counts[:2]): r"counts must be torch.int32.* >= 3, got .*\[2\]",
        lambda: fill(cached=step.cached.long()): "cached_lens must be torch.int32.* torch.int64",
        lambda: fill(pages=pages.T): "page_table must be .* contiguous .* strides",
        lambda: fill(out=room.int()): "input_ids must be torch.int64",
        lambda: plan_prefill(step.counts, plan._replace(starts=step.starts[:2]), 16): "starts .* 3",
        lambda: plan_prefill(step.counts, plan._replace(items=items.long()), 16): "items must be",
        lambda: receive(staged, writes, pages, 2): r"staged must be .* >= 12, got .*\[10\]",
        lambda: write(writes[:1].expand(2)): r"values must be .* strides \[0\]",
        lambda: write(writes[:3]): "rows must be .* >= 3",
        lambda: write(writes[:2].float()): "values must be torch.int32 or torch.int64",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
