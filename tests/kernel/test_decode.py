"""The attention kernels of decode steps, and the plan that cuts their keys into parts.

Everything that a step does not use is poison: rows of q and out, what the plan held before, the
lengths of requests that don't decode. Reading any of it shows, or crashes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.kernel.triton.decode import (
    DecodeConfig,
    DecodePlan,
    decode_attention,
    plan_decode,
)

from .conftest import DEVICE
from .paged import Paged, make_paged, reference_attention

# As for prefill: the weights and the result are rounded to the dtype; in float32 the sums' own
# rounding is what is left.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
GARBAGE = 1 << 30


def ints(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def empty_plan(max_requests: int, max_parts: int, window: int | None = None) -> DecodePlan:
    """Room for a plan, with garbage in it."""
    plan = DecodePlan.empty(max_requests, 1, window, DEVICE, max_parts=max_parts)
    plan.items.fill_(GARBAGE)
    plan.first_item.fill_(GARBAGE)
    return plan


def make_q(size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """`[B, Hq, D]`, as a view into merged projections that are NaN elsewhere."""
    random = torch.Generator().manual_seed(size)
    qkv = torch.full((size, heads[0] + 2 * heads[1], head_dim), torch.nan)
    qkv[:, : heads[0]] = torch.randn(size, heads[0], head_dim, generator=random)
    return qkv.to(DEVICE, dtype)[:, : heads[0]]


def attend(
    q: torch.Tensor,
    paged: Paged,
    plan: DecodePlan,
    surplus: int = 0,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Plan the requests in `paged`, with so many more places, and compute: `[B + surplus, Hq, D]`.

    What the kernels leave out stays NaN.
    """
    size = len(paged.rows)
    q = torch.cat([q, q.new_full((surplus, *q.shape[1:]), torch.nan)]) if surplus else q
    rows, seq_lens = (torch.cat([x, ints([GARBAGE] * surplus)]) for x in paged[3:])
    plan_decode(rows, seq_lens, ints([size, GARBAGE, GARBAGE]), plan)
    # Not before: some kernel must lie between the plan's and the one that reads it.
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
    decode_attention(q, *paged[:3], plan, out, scale=q.shape[-1] ** -0.5, config=config)
    return out


def check(out: torch.Tensor, q: torch.Tensor, paged: Paged, window: int | None) -> None:
    size = len(paged.rows)
    expected = reference_attention(q, paged, scale=q.shape[-1] ** -0.5, window=window)
    error = (out[:size].double() - expected).abs()
    bound = TOLERANCE[q.dtype] * (1 + expected.abs())
    assert (error <= bound).all(), f"max error {error.max():.2e}, mean {error.mean():.2e}"
    assert out[size:].isnan().all(), "places of no request were written"


# From a single key to nine parts of 64; some end where a part, a block or a page does.
SEQ_LENS = [1, 64, 65, 517, 17, 128, 3, 250]


@pytest.mark.parametrize("window", [None, 1, 70, 200])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "max_parts"),
    [
        ((4, 2), 16, 16, 16),  # parts of 128
        ((5, 1), 80, 3, 24),  # parts as short as can be
        ((2, 2), 64, 1, 3),  # fewer than requests, so most have one
        ((2, 1), 128, 64, 20),
        ((20, 1), 24, 16, 1),  # the longest parts there can be
    ],
)
def test_ragged_batch(heads, head_dim, page_size, max_parts, window, device) -> None:
    paged = make_paged(
        SEQ_LENS, page_size=page_size, num_kv_heads=heads[1], head_dim=head_dim, device=device
    )
    q = make_q(len(SEQ_LENS), heads, head_dim, torch.float32)
    plan = empty_plan(len(SEQ_LENS) + 2, max_parts, window)
    check(attend(q, paged, plan), q, paged, window)


def test_half_precision(device) -> None:
    paged = make_paged(
        SEQ_LENS, page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=device
    )
    q = make_q(len(SEQ_LENS), (6, 2), 64, torch.float16)
    check(attend(q, paged, empty_plan(8, 12)), q, paged, None)


def test_more_parts_than_are_combined_at_once(device) -> None:
    paged = make_paged([1200, 5], page_size=16, num_kv_heads=1, head_dim=16, device=device)
    q = make_q(2, (2, 1), 16, torch.float32)
    plan = empty_plan(2, 32)
    check(attend(q, paged, plan), q, paged, None)
    assert plan.first_item.tolist() == [0, 19, 20], "19 parts of 64 keys"


def test_one_plan_serves_steps_of_any_size(device) -> None:
    """As the engine's does: a smaller step finds what a larger one left, and all its places."""
    plan = empty_plan(8, 12, window=300)
    for seq_lens, surplus in ((SEQ_LENS, 0), ([5, 400], 3), ([1], 7), ([300, 300, 300], 5)):
        paged = make_paged(seq_lens, page_size=16, num_kv_heads=2, head_dim=16, device=device)
        q = make_q(len(seq_lens), (4, 2), 16, torch.float32)
        check(attend(q, paged, plan, surplus), q, paged, 300)


def test_nobody_decodes(device) -> None:
    paged = make_paged([9], page_size=16, num_kv_heads=1, head_dim=16, device=device)
    nobody = paged._replace(rows=paged.rows[:0], seq_lens=paged.seq_lens[:0])
    q = make_q(1, (2, 1), 16, torch.float32)
    out = attend(q[:0], nobody, empty_plan(4, 12), surplus=4)
    assert out.shape[0] == 4
    assert out.isnan().all()


def test_large_scores_do_not_overflow(device) -> None:
    """Each part has its own largest score, and the combination one for all."""
    paged = make_paged([300], page_size=16, num_kv_heads=1, head_dim=16, device=device)
    q = make_q(1, (2, 1), 16, torch.float32) * 500
    out = attend(q, paged, empty_plan(1, 12))
    expected = reference_attention(q, paged, scale=0.25)
    # The scores, in the hundreds, are off by 1e-5 each, which the exponential passes on.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


def test_config_is_only_a_choice(device) -> None:
    paged = make_paged(SEQ_LENS, page_size=16, num_kv_heads=1, head_dim=16, device=device)
    q = make_q(len(SEQ_LENS), (2, 1), 16, torch.float32)
    for config in (DecodeConfig(16, 4, 1), DecodeConfig(128, 8, 2)):
        out = attend(q, paged, empty_plan(8, 12), config=config)
        check(out, q, paged, None)


def test_refuses_what_it_cannot_read(device) -> None:
    paged = make_paged([9, 4], page_size=4, num_kv_heads=2, head_dim=16, device=device)
    q = make_q(2, (4, 2), 16, torch.float32)
    plan = empty_plan(2, 4)
    plan_decode(paged.rows, paged.seq_lens, ints([2]), plan)
    out = torch.zeros(2, 4, 16, device=device)

    def call(**changes: Any) -> None:
        pages = {name: getattr(paged, name) for name in ("k_pages", "v_pages", "page_table")}
        arguments = {"q": q, **pages, "plan": plan, "out": out}
        decode_attention(**(arguments | changes), scale=0.25)

    call()
    for changes in (
        {"q": q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"out": torch.empty(2, 4, 32, device=device)[..., :16]},
    ):
        with pytest.raises(ValueError, match="heads must be contiguous: q strides"):
            call(**changes)
    with pytest.raises(ValueError, match=r"keys .* and values .* differ"):
        call(v_pages=paged.v_pages[:, :2])


def planned(seq_lens: list[int], max_parts: int, window: int | None, places: int) -> list[range]:
    """Plan it, and check the plan: returns each item's keys."""
    plan = empty_plan(places + 1, max_parts, window)
    size, surplus = len(seq_lens), [GARBAGE] * (places - len(seq_lens))
    rows = [*range(100, 100 + size)]
    plan_decode(ints(rows + surplus), ints(seq_lens + surplus), ints([size]), plan)
    first_item, items = plan.first_item.tolist(), plan.items.tolist()
    count = first_item[size]
    assert count <= max_parts + size
    assert first_item[0] == 0
    assert first_item[size:-1] == [count] * (places + 1 - size), "the others have no items"
    assert first_item[-1] == GARBAGE, "this place is not part of the step"
    keys = []
    for b, length in enumerate(seq_lens):
        own = items[first_item[b] : first_item[b + 1]]
        parts = [range(start, end) for _, _, start, end, *_ in own]
        assert all(parts), "a part without keys"
        first = max(0, length - (window or length))
        assert [key for part in parts for key in part] == [*range(first, length)]
        assert all((item[0], item[1], item[4]) == (b, rows[b], len(own) == 1) for item in own)
        keys += parts
    assert all(start >= end for _, _, start, end, *_ in items[count : max_parts + places])
    assert items[max_parts + places :] == [[GARBAGE] * len(items[0])]
    return keys


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=20),
    st.sampled_from([1, 2, 7, 40]),
    st.sampled_from([None, 1, 100]),
    st.integers(0, 3),
)
@example([1], 1, None, 0)
@example([64] * 16, 16, None, 0)
@example([65] * 16, 16, None, 0)
def test_items_partition_each_request_s_keys(seq_lens, max_parts, window, surplus) -> None:
    planned(seq_lens, max_parts, window, len(seq_lens) + surplus)


def test_parts_are_as_short_as_their_number_allows() -> None:
    """What the module's docstring draws, and its neighbours."""
    assert [len(keys) for keys in planned([700, 130, 300], 5, None, 3)] == [
        *(256, 256, 188, 130, 256, 44)
    ]
    assert {len(keys) for keys in planned([640], 10, None, 1)} == {64}
    assert {len(keys) for keys in planned([640], 9, None, 1)} == {128}
    assert [len(keys) for keys in planned([640, 1], 100, 100, 2)] == [64, 36, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("heads", [(16, 8), (40, 8)])
def test_shapes_of_real_models(heads, page_size, window, device) -> None:
    """Qwen3's 0.6B and 14B in bfloat16, 256 requests of 100 to 2000 tokens."""
    random = torch.Generator(device).manual_seed(0)
    lengths = torch.randint(100, 2001, (256,), generator=random, device=device)
    counts = (lengths + page_size - 1) // page_size
    num_pages = int(counts.sum()) + 1
    order = torch.randperm(num_pages, generator=random, device=device)
    columns = torch.arange(int(counts.max()), device=device)
    own = columns < counts[:, None]
    # Columns beyond a request's pages name a page of NaN.
    pages = order[((counts.cumsum(0) - counts)[:, None] + columns).where(own, num_pages - 1)]
    rows = torch.randperm(256, generator=random, device=device)
    page_table = torch.empty_like(pages, dtype=torch.int32)
    page_table[rows] = pages.int()
    pool = torch.empty(
        (2, num_pages, page_size, heads[1], 128), dtype=torch.bfloat16, device=device
    )
    pool.normal_(generator=random)
    pool[:, order[-1]] = torch.nan
    paged = Paged(*pool, page_table, rows.int(), lengths.int())
    q = make_q(256, heads, 128, torch.bfloat16)
    out = attend(q, paged, empty_plan(260, 264, window), surplus=4)
    assert out[256:].isnan().all()
    assert not out[:256].isnan().any()
    some = torch.tensor([0, 1, 2, 100, 255], device=device)
    few = paged._replace(rows=rows[some], seq_lens=paged.seq_lens[some])
    expected = reference_attention(q[some], few, scale=128**-0.5, window=window)
    error = (out[some].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Rounding the weights and the result to 8 bits: 2^-9 / sqrt(3) each.
    assert error.max() < 5e-3, f"max relative error {error.max():.2e}, mean {error.mean():.2e}"
