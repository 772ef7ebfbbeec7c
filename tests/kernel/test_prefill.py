"""The attention kernel of prefill and mixed batches, against attention in float64.

That a token's bits depend on nothing else in the batch is what `--deterministic` rests on: it is
compared exactly.
"""

from __future__ import annotations

import math

import pytest
import torch

from minisgl.kernel.triton.prefill import PrefillPlan, Tiles, block_tokens, prefill_attention

from .paged import Paged, make_paged, reference_attention

# The weights and the result are rounded to the dtype (some units in the last place of values up to
# about 4); in float32 the sums' own rounding is what is left.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_q(num_tokens: int, heads: tuple[int, int], head_dim: int, dtype, device) -> torch.Tensor:
    """`[T, Hq, D]`, as a view into merged projections that are NaN elsewhere."""
    random = torch.Generator().manual_seed(num_tokens)
    qkv = torch.full((num_tokens, heads[0] + 2 * heads[1], head_dim), torch.nan)
    qkv[:, : heads[0]] = torch.randn(num_tokens, heads[0], head_dim, generator=random)
    return qkv.to(device, dtype)[:, : heads[0]]


def make_plan(lengths: list[int], paged: Paged, step: int, surplus: int = 0) -> PrefillPlan:
    """The plan for `lengths[b]` tokens of each request; the `surplus` items must not be read."""
    items = [(b, first) for b, n in enumerate(lengths) for first in range(0, n, step)]
    starts = [sum(lengths[:b]) for b in range(len(lengths) + 1)]

    def tensor(numbers: list) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=paged.rows.device)

    poison = [(1 << 30, 1 << 30)] * surplus
    rows, seq_lens = paged.rows, paged.seq_lens
    return PrefillPlan(
        tensor(items + poison).view(-1, 2), tensor([len(items)]), rows, tensor(starts), seq_lens
    )


def attend(
    q: torch.Tensor,
    paged: Paged,
    lengths: list[int],
    window: int | None = None,
    surplus: int = 0,
    **options,
) -> torch.Tensor:
    """What the kernel writes; what it leaves out stays NaN."""
    heads, head_dim = q.shape[1:]
    low = options.get("low", False)
    step = block_tokens(heads, paged.k_pages.shape[2], head_dim, q.dtype, low=low)
    plan = make_plan(lengths, paged, step, surplus)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    pages = paged.k_pages, paged.v_pages, paged.page_table
    prefill_attention(q, *pages, plan, out, scale=head_dim**-0.5, window=window, **options)
    return out


def check(q: torch.Tensor, paged: Paged, lengths: list[int], window: int | None) -> None:
    num_tokens = sum(lengths)
    out = attend(q, paged, lengths, window, surplus=2)
    expected = reference_attention(
        q[:num_tokens], paged, lengths, scale=q.shape[-1] ** -0.5, window=window
    )
    error = (out[:num_tokens].double() - expected).abs()
    bound = TOLERANCE[q.dtype] * (1 + expected.abs())
    assert (error <= bound).all(), f"max error {error.max():.2e}, mean {error.mean():.2e}"
    assert out[num_tokens:].isnan().all(), "rows of no request were written"


# Requests with and without keys from before this step; one of a single token, one of none; more
# tokens than an item covers, for any group.
SEQ_LENS = [100, 9, 1, 97, 40, 33]
LENGTHS = [90, 9, 1, 1, 0, 20]


# On a GPU each case is compiled, so they are few: every value, and some pairs of any two. The last
# one's group has more heads than a tile of float32 else has rows.
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "window"),
    [
        ((4, 2), 16, 16, None),
        ((8, 1), 16, 3, 7),
        ((5, 1), 24, 3, 45),
        ((1, 1), 24, 32, 1),
        ((2, 2), 64, 1, 7),
        ((6, 2), 64, 16, 45),
        ((3, 1), 80, 32, None),
        ((5, 1), 80, 1, 1),
        ((4, 2), 128, 64, None),
        ((2, 2), 128, 16, 1),
        ((8, 1), 200, 64, 45),
        ((3, 1), 200, 3, 7),
        ((40, 1), 16, 64, 7),
    ],
)
def test_ragged_batch(heads, head_dim, page_size, window, device) -> None:
    paged = make_paged(
        SEQ_LENS, page_size=page_size, num_kv_heads=heads[1], head_dim=head_dim, device=device
    )
    q = make_q(sum(LENGTHS) + 3, heads, head_dim, torch.float32, device)
    check(q, paged, LENGTHS, window)


@pytest.mark.parametrize("window", [None, 45])
def test_half_precision(window, device) -> None:
    paged = make_paged(
        SEQ_LENS, page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=device
    )
    q = make_q(sum(LENGTHS), (6, 2), 64, torch.float16, device)
    check(q, paged, LENGTHS, window)


def check_bits(
    heads: tuple[int, int],
    head_dim: int,
    length: int,
    chunks: list[int],
    singles: list[int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A prompt whole, in chunks, its tokens one by one and in another batch: the same bits."""
    shape = {"num_kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype, "device": device}
    paged = make_paged([length], page_size=16, **shape)
    q = make_q(length, heads, head_dim, dtype, device)
    whole = attend(q, paged, [length], window)
    assert not whole.isnan().any()

    def part(first: int, count: int, low: bool = False) -> torch.Tensor:
        before = paged._replace(seq_lens=paged.seq_lens - (length - first - count))
        return attend(q[first : first + count], before, [count], window, low=low)

    assert sum(chunks) == length
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    chunked = torch.cat([part(*pair) for pair in zip(starts, chunks, strict=True)])
    assert torch.equal(chunked, whole)
    for token in singles:
        assert torch.equal(part(token, 1)[0], whole[token]), f"token {token}"
        assert torch.equal(part(token, 1, low=True)[0], whole[token]), f"token {token}, low tile"

    # Behind other requests, and from pages of another size, in another order.
    others = make_paged([length, length, 5], page_size=9, **shape)
    slots = torch.arange(length, device=device)
    here, there = (
        (p.page_table[p.rows[0], slots // size].long(), slots % size)
        for p, size in ((paged, 16), (others, 9))
    )
    others.k_pages[there] = paged.k_pages[here]
    others.v_pages[there] = paged.v_pages[here]
    order = [1, 2, 0]
    others = others._replace(rows=others.rows[order], seq_lens=others.seq_lens[order])
    half, tail = length // 2, length // 3
    mixed = torch.cat([q[: half + 1], q[-tail:]])
    batched = attend(mixed, others, [half, 1, tail], window)
    assert torch.equal(batched[half + 1 :], whole[-tail:])


@pytest.mark.parametrize(
    ("heads", "head_dim", "window"),
    [((4, 2), 16, None), ((4, 2), 16, 64), ((5, 1), 40, 1), ((5, 1), 40, 37)],
)
def test_bits_depend_on_nothing_else(heads, head_dim, window, device) -> None:
    singles = [0, 1, 31, 32, 33, 63, 64, 99, 148]
    chunks = [1, 31, 1, 50, 66]
    check_bits(heads, head_dim, 149, chunks, singles, window, torch.float32, device)


def test_every_token_alone(device) -> None:
    check_bits((4, 2), 16, 40, [1] * 40, [], None, torch.float32, device)


def test_tiles_are_only_a_choice(device) -> None:
    paged = make_paged(SEQ_LENS, page_size=16, num_kv_heads=2, head_dim=16, device=device)
    q = make_q(sum(LENGTHS), (4, 2), 16, torch.float32, device)
    expected = attend(q, paged, LENGTHS)
    torch.testing.assert_close(
        attend(q, paged, LENGTHS, tiles=Tiles(64, 4, 1)), expected, rtol=2e-6, atol=2e-6
    )


def test_reads_how_many_items_there_are(device) -> None:
    """A captured graph replays the same launch for fewer items, or none."""
    paged = make_paged([60], page_size=16, num_kv_heads=2, head_dim=16, device=device)
    q = make_q(60, (4, 2), 16, torch.float32, device)
    step = block_tokens(4, 2, 16, torch.float32)
    plan = make_plan([60], paged, step)
    for count in (0, 1, len(plan.items)):
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        plan.num_items.fill_(count)
        pages = paged.k_pages, paged.v_pages, paged.page_table
        prefill_attention(q, *pages, plan, out, scale=0.25, window=None)
        assert out.isnan().flatten(1).any(1).sum() == 60 - min(60, count * step)


def test_block_tokens() -> None:
    for heads, half, single in (
        ((16, 8, 128), 64, 16),
        ((40, 8, 128), 25, 6),
        ((8, 8, 256), 64, 16),
        ((33, 1, 64), 3, 1),
        ((128, 1, 128), 1, 1),
        ((17, 1, 200), 3, 1),
    ):
        assert block_tokens(*heads, torch.bfloat16) == block_tokens(*heads, torch.float16) == half
        assert block_tokens(*heads, torch.float32) == single
        low = max(64, 2 ** math.ceil(math.log2(heads[0] / heads[1])))
        assert block_tokens(*heads, torch.bfloat16, low=True) == low * heads[1] // heads[0]
    for heads, head_dim, message in (
        ((3, 2), 64, "3 query heads over 2 KV heads"),
        ((129, 1), 64, "128 at most at head size 64"),
        ((65, 1), 129, "64 at most at head size 129"),
        ((1, 2), 64, "1 query heads over 2 KV heads"),
        ((2, 2), 257, "Head size 257"),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match=message):
                block_tokens(*heads, head_dim, dtype)


def test_refuses_what_it_cannot_read(device) -> None:
    paged = make_paged([9], page_size=16, num_kv_heads=2, head_dim=16, device=device)
    q = make_q(9, (4, 2), 16, torch.float32, device)
    out = torch.empty(q.shape, device=device)
    plan = make_plan([9], paged, 64)

    def call(**changes) -> None:
        arguments = {
            "q": q,
            "k_pages": paged.k_pages,
            "v_pages": paged.v_pages,
            "page_table": paged.page_table,
            "plan": plan,
            "out": out,
            "scale": 0.25,
            "window": None,
        }
        prefill_attention(**arguments | changes)

    call()
    for message, changes in {
        "q must be": {"q": q.transpose(0, 1)},
        "out must be contiguous, of q's shape": {"out": out[:8]},
        "k_pages and v_pages must both be": {"v_pages": paged.v_pages[1:]},
        "pages must be contiguous": {
            "k_pages": paged.k_pages.transpose(0, 1).contiguous().transpose(0, 1)
        },
        "must have one dtype": {"out": out.half()},
        "page_table must be": {"page_table": paged.page_table.long()},
        "plan.rows must be int32": {"plan": plan._replace(rows=plan.rows.long())},
        "plan.starts must be int32 \\[2\\]": {"plan": plan._replace(starts=plan.starts[:1])},
        "scale and window must be positive, got 0.25 and 0": {"window": 0},
        "scale and window must be positive, got 0.0": {"scale": 0.0},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**changes)


# Each is a kernel to compile, which takes seconds: so not all with all.
_PAGES = [
    ((16, 8), torch.bfloat16, size, window) for size in (1, 100, 256) for window in (None, 500)
]
_HEADS = [
    (heads, dtype, 16, window)
    for heads, dtype, window in (
        ((16, 8), torch.bfloat16, None),
        ((16, 8), torch.float16, 500),
        ((40, 8), torch.bfloat16, 500),
        ((40, 8), torch.float16, None),
        ((32, 4), torch.bfloat16, None),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype", "page_size", "window"), [*_PAGES, *_HEADS])
def test_models_shapes(heads, dtype, page_size, window, device) -> None:
    seq_lens, lengths = [1024, 3000, 777, 130, 1], [1024, 411, 777, 1, 1]
    paged = make_paged(
        seq_lens,
        page_size=page_size,
        num_kv_heads=heads[1],
        head_dim=128,
        dtype=dtype,
        device=device,
    )
    check(make_q(sum(lengths) + 5, heads, 128, dtype, device), paged, lengths, window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 192, 256])
def test_head_sizes_on_the_device(head_dim, dtype, device) -> None:
    seq_lens, lengths = [600, 300, 40], [600, 77, 1]
    paged = make_paged(
        seq_lens, page_size=16, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=device
    )
    check(make_q(sum(lengths), (6, 2), head_dim, dtype, device), paged, lengths, None)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(16, 8), (40, 8)])
def test_bits_on_the_device(heads, head_dim, window, device) -> None:
    singles = [*range(0, 1500, 97), 127, 128, 129, 1023, 1024, 1499]
    chunks = [1, 127, 300, 512, 17, 543]
    check_bits(heads, head_dim, 1500, chunks, singles, window, torch.bfloat16, device)
