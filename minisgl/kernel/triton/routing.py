"""Which token goes to which expert: the choice, and pairs grouped by what was chosen.

A pair is a token with one of its k experts: pair `t * k + j` is token t's j-th. The device groups
the pairs by expert, and the host needs no number of it. With blocks of 4 pairs, three experts,
pairs 0 to 8 and the experts 0 2 0 0 2 0 0 2 0:

    order   0 2 3 5 6 8 1 4 7    pairs by expert, then number
    blocks  (0, 0, 4) (0, 4, 6) (2, 6, 9), then surplus ones: (-1, 0, 0)

A block is an expert and a range of `order`. The table is as long as the most blocks that there
can be, so that a grid made from it is right for every choice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .norm import FLOATS
from .runtime import enter, pdl

__all__ = ["MAX_EXPERTS", "group_pairs", "topk_softmax"]

MAX_EXPERTS, MAX_TOP_K = 512, 16
_FEW_PAIRS = 64


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: softmax over all experts in float32, then the top k.

    `router_logits [T, E]` with any row stride, E <= 512 and k <= 16, to weights `[T, k]` of the
    same dtype and ids `[T, k]` int64, largest first, of equal ones the lowest id. A row with a NaN
    has weights of NaN and some k different ids. Raises `ValueError` for other shapes, dtypes and
    strides. Semantics: `torch_ops.topk_softmax`.
    """
    if router_logits.dim() != 2 or router_logits.dtype not in FLOATS:
        raise ValueError(
            f"router_logits must be [T, E] of {FLOATS}, not {tuple(router_logits.shape)} "
            f"{router_logits.dtype}"
        )
    tokens, experts = router_logits.shape
    if not 1 <= top_k <= min(experts, MAX_TOP_K) or experts > MAX_EXPERTS:
        raise ValueError(
            f"top_k must be in 1 .. {MAX_TOP_K}, and from k to {MAX_EXPERTS} experts: "
            f"top_k is {top_k} of {experts} experts"
        )
    if router_logits.stride(1) != 1:
        raise ValueError(
            f"router_logits must have a last stride of 1: strides {router_logits.stride()}"
        )
    weights = router_logits.new_empty(tokens, top_k)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if tokens:
        rows = 4  # a warp each
        _topk_kernel[(triton.cdiv(tokens, rows),)](
            router_logits,
            weights,
            ids,
            tokens,
            experts,
            router_logits.stride(0),
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            ROWS=rows,
            WIDTH=_width(experts),
            SLOTS=triton.next_power_of_2(top_k),
            **pdl(router_logits),
        )
    return weights, ids


def _width(experts: int) -> int:
    """Columns of a program that has one for each expert."""
    width: int = triton.next_power_of_2(experts)
    return max(16, width)


def group_pairs(
    ids: torch.Tensor, first_expert: int, experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`order [T k]` and `blocks [n, 3]`, int32, for the largest n that there can be.

    A few pairs one program compares with each other. Of more, up to 128 programs take a part each:
    count them, see in the counts where theirs begin, and place them.
    """
    pairs, width = ids.numel(), _width(experts)
    occupied = min(pairs, experts)
    num_blocks = (pairs + occupied * (block_m - 1)) // block_m
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    blocks = torch.empty(num_blocks, 3, dtype=torch.int32, device=ids.device)
    if pairs <= _FEW_PAIRS:
        size = max(16, triton.next_power_of_2(pairs))
        few = (ids, pairs, first_expert, experts, order, blocks, num_blocks)
        _compare_kernel[(1,)](*few, BLOCK_M=block_m, SIZE=size, num_warps=8, **pdl(ids))
        return order, blocks
    step = min(128, 8192 // width)
    part = triton.cdiv(triton.cdiv(pairs, 128), step) * step
    parts = triton.cdiv(pairs, part)
    counts = torch.empty(parts, width, dtype=torch.int32, device=ids.device)
    numbers = (ids, counts, pairs, part, first_expert, experts)
    shape = {"STEP": step, "WIDTH": width, "num_warps": 8, **pdl(ids)}
    _count_kernel[(parts,)](*numbers, **shape)
    _place_kernel[(parts,)](*numbers, order, blocks, num_blocks, BLOCK_M=block_m, **shape)
    return order, blocks


@triton.jit(do_not_specialize=["T"])
def _topk_kernel(
    logits,
    weights,
    ids,
    T,
    E,
    stride,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    enter(PDL)
    read = logits + tl.minimum(row, T - 1).to(tl.int64)[:, None] * stride + column
    values = tl.load(read, mask=column < E, other=float("-inf")).to(tl.float32)
    # What is left to choose from: any number, -inf and NaN too, comes before a choice made. So do
    # columns beyond E, but the lowest of equal ones is chosen, and there are k before them.
    lowest = -3.4028234663852886e38
    left = tl.where(values >= lowest, values, lowest)
    probs = tl.exp(values - tl.max(values, axis=1)[:, None])
    probs = probs / tl.sum(probs, axis=1)[:, None]
    chosen_probs = tl.zeros((ROWS, SLOTS), tl.float32)
    chosen_ids = tl.zeros((ROWS, SLOTS), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, axis=1)[:, None]
        choice = tl.min(tl.where(left == best, column, WIDTH), axis=1)[:, None]
        prob = tl.sum(tl.where(column == choice, probs, 0.0), axis=1)[:, None]
        left = tl.where(column == choice, float("-inf"), left)
        chosen_probs = tl.where(slot == j, prob, chosen_probs)
        chosen_ids = tl.where(slot == j, choice, chosen_ids)
    if RENORMALIZE:
        chosen_probs = chosen_probs / tl.sum(chosen_probs, axis=1)[:, None]
    mask = (row < T)[:, None] & (slot < TOP_K)
    written = row.to(tl.int64)[:, None] * TOP_K + slot
    tl.store(weights + written, chosen_probs, mask=mask)
    tl.store(ids + written, chosen_ids, mask=mask)


@triton.jit
def _experts(ids, pair, end, first_expert, E):
    """int32 `[pairs]`: each pair's expert of those held, or E."""
    # Not converted before the range is known: any int64 is allowed.
    expert = tl.load(ids + pair, mask=pair < end, other=-1) - first_expert
    held = (expert >= 0) & (expert < E) & (pair < end)
    return tl.where(held, expert, E).to(tl.int32)


@triton.jit
def _marks(ids, pair, end, first_expert, E, WIDTH: tl.constexpr):
    """int32 `[pairs, WIDTH]`: 1 where the column is the pair's expert."""
    expert, column = (
        _experts(ids, pair, end, first_expert, E)[:, None],
        tl.arange(0, WIDTH)[None, :],
    )
    return ((expert == column) & (column < E)).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "first_expert", "num_blocks"])
def _compare_kernel(
    ids,
    num_pairs,
    first_expert,
    E,
    order,
    blocks,
    num_blocks,
    BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.arange(0, SIZE)
    enter(PDL)
    expert = _experts(ids, pair, num_pairs, first_expert, E)
    mine, other = expert[:, None], expert[None, :]
    is_earlier = pair[None, :] < pair[:, None]
    start = tl.sum((other < mine).to(tl.int32), axis=1)
    height = tl.sum((other == mine).to(tl.int32), axis=1)
    ahead = tl.sum(((other == mine) & is_earlier).to(tl.int32), axis=1)
    tl.store(order + start + ahead, pair, mask=expert < E)
    # The first pair of each block writes it.
    leads = (expert < E) & (ahead % BLOCK_M == 0)
    is_before = (other < mine) | ((other == mine) & is_earlier)
    block = blocks + 3 * tl.sum((leads[None, :] & is_before).to(tl.int32), axis=1)
    row = start + ahead
    tl.store(block, expert, mask=leads)
    tl.store(block + 1, row, mask=leads)
    tl.store(block + 2, tl.minimum(row + BLOCK_M, start + height), mask=leads)
    used = tl.sum(leads.to(tl.int32), axis=0)
    for first in range(0, num_blocks, SIZE):
        surplus = first + pair
        mask = (surplus >= used) & (surplus < num_blocks)
        tl.store(blocks + 3 * surplus, -1, mask=mask)
        tl.store(blocks + 3 * surplus + 1, 0, mask=mask)
        tl.store(blocks + 3 * surplus + 2, 0, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "part", "first_expert"])
def _count_kernel(
    ids,
    counts,
    num_pairs,
    part,
    first_expert,
    E,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    begin = program * part
    end = tl.minimum(begin + part, num_pairs)
    enter(PDL)
    found = tl.zeros([WIDTH], tl.int32)
    for start in range(begin, end, STEP):
        marks = _marks(ids, start + tl.arange(0, STEP), end, first_expert, E, WIDTH)
        found += tl.sum(marks, axis=0)
    tl.store(counts + program * WIDTH + tl.arange(0, WIDTH), found)


@triton.jit(do_not_specialize=["num_pairs", "part", "first_expert", "num_blocks"])
def _place_kernel(
    ids,
    counts,
    num_pairs,
    part,
    first_expert,
    E,
    order,
    blocks,
    num_blocks,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin = program * part
    end = tl.minimum(begin + part, num_pairs)
    expert = tl.arange(0, WIDTH)[None, :]
    lines = tl.arange(0, STEP)
    enter(PDL)
    earlier = tl.zeros([WIDTH], tl.int32)  # pairs of each expert in the parts before this one
    total = tl.zeros([WIDTH], tl.int32)
    for first in range(0, programs, STEP):
        other = (first + lines)[:, None]
        found = tl.load(counts + other * WIDTH + expert, mask=other < programs, other=0)
        total += tl.sum(found, axis=0)
        earlier += tl.sum(tl.where(other < program, found, 0), axis=0)
    ends = tl.cumsum(total)
    heights = (total + BLOCK_M - 1) // BLOCK_M
    ends_in_blocks = tl.cumsum(heights)

    for start in range(program * STEP, num_blocks, programs * STEP):
        block = start + lines
        mask = block < num_blocks
        # An expert is past when its blocks end here or before; all are for a surplus block.
        owner = tl.sum((ends_in_blocks[None, :] <= block[:, None]).to(tl.int32), axis=1)
        own = owner[:, None] == expert
        row = (ends - total)[None, :]
        row += (block[:, None] - (ends_in_blocks - heights)[None, :]) * BLOCK_M
        last = tl.minimum(row + BLOCK_M, ends[None, :])
        tl.store(blocks + block * 3, tl.where(owner < WIDTH, owner, -1), mask=mask)
        tl.store(blocks + block * 3 + 1, tl.sum(tl.where(own, row, 0), axis=1), mask=mask)
        tl.store(blocks + block * 3 + 2, tl.sum(tl.where(own, last, 0), axis=1), mask=mask)

    free = ends - total + earlier  # the next place of each expert
    for start in range(begin, end, STEP):
        pair = start + lines
        marks = _marks(ids, pair, end, first_expert, E, WIDTH)
        own = _experts(ids, pair, end, first_expert, E)
        # Cheaper than to add up the marks along the pairs.
        ahead = (own[None, :] == own[:, None]) & (lines[None, :] < lines[:, None])
        place = tl.sum(marks * free[None, :], axis=1) + tl.sum(ahead.to(tl.int32), axis=1)
        tl.store(order + place, pair, mask=own < E)
        free += tl.sum(marks, axis=0)
