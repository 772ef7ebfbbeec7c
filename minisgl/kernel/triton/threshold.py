"""Where top-k, top-p and min-p end in each row of logits, without a sort.

Each filter keeps a beginning of the tokens sorted by logit, then id, and so do all together. Its
end is a logit, and an id for the ones equal to it:

    kept: logit > threshold, or logit = threshold and id < tie_end

Top-k and top-p are one search. With a weight for each token (1, or its probability), a token is
kept as long as what stands before it weighs less than a goal (k, or top_p times the sum). W(x),
the weight of all tokens at x or above, falls with x, and the last one that is kept is

    at x or above   if W(x) >= goal          below x   if W(x) < goal

so each x that is tried cuts the interval that holds it. `WAYS` are tried in one pass:

    1  quantiles of a sample: one pass over the row leaves about V / WAYS tokens
    2  these are copied to a list, unless they are too many: then the row stays the list
    3  equally spaced ones, in passes over the list until the interval is a single number

Numbers are compared as integers that are ordered as the floats are, which makes stage 3 end after
a few passes whatever the logits are. A row is one program's, its sums are float32 in each lane
and float64 across them, and nothing but the row decides their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import enter, pdl
from .sample import INF, check_logits, check_vectors, weigh

__all__ = ["find_thresholds"]

BLOCK = tl.constexpr(2048)
"""Tokens that a pass with `WAYS` sums in each lane takes at a time."""
WIDE = tl.constexpr(8192)
"""The same where there is one sum, or none."""
WAYS = tl.constexpr(8)
SAMPLE = tl.constexpr(128)
LIST_PART = 3
"""A list may hold one in so many tokens: more than twice what stage 1 mostly leaves."""
LOWEST = tl.constexpr(-0x7F800001)
"""The integer of -inf, before the bits are dropped that the logits' dtype doesn't have."""
IDLE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""The lowest bits of a float32 that are 0 in all numbers of the dtype."""


@triton.jit
def _key(values, IDLE: tl.constexpr):
    """int32 ordered as the float32 are; +0 and -0 are one."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> IDLE


@triton.jit
def _value(key, IDLE: tl.constexpr):
    """The float32 whose key it is."""
    bits = key << IDLE
    bits = tl.where(key < 0, (bits | ((1 << IDLE) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(values, ids, ends):
    return tl.load(values + ids, mask=ids < ends, other=-INF).to(tl.float32)


@triton.jit
def _peak(logits, V):
    """The largest logit."""
    best = tl.full([WIDE], -INF, tl.float32)
    for start in tl.range(0, V, WIDE, num_stages=3):
        best = tl.maximum(best, _load(logits, start + tl.arange(0, WIDE), V))
    return tl.max(best)


@triton.jit
def _mass(logits, V, end, equal, peak, heat):
    """The weight of the tokens above `end`, and of `equal` that are equal to it: float64."""
    parts = tl.zeros([WIDE], tl.float32)
    for start in tl.range(0, V, WIDE, num_stages=3):
        values = _load(logits, start + tl.arange(0, WIDE), V)
        parts += tl.where(values > end, weigh(values, peak, heat), 0.0)
    return tl.sum(parts.to(tl.float64)) + equal * weigh(end, peak, heat).to(tl.float64)


@triton.jit
def _sample_pivots(logits, V, IDLE: tl.constexpr):
    """Of a sample, the largest keys with at least 0, 1, 2, ... of `WAYS` parts of it above them."""
    ids = (tl.arange(0, SAMPLE).to(tl.int64) * V) // SAMPLE
    keys = _key(tl.load(logits + ids).to(tl.float32), IDLE)
    higher = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
    far = higher[None, :] >= tl.arange(0, WAYS)[:, None] * (SAMPLE // WAYS)
    return tl.max(tl.where(far, keys[None, :], LOWEST >> IDLE), axis=1).to(tl.int64)


@triton.jit
def _spread_pivots(low, high):
    """Equally spaced in `(low, high]`, the last one `high`."""
    steps = tl.arange(0, WAYS).to(tl.int64) + 1
    return low + ((high - low) * steps + WAYS - 1) // WAYS


@triton.jit
def _narrow(
    values,
    count,
    ends,
    pivots,
    low,
    high,
    above,
    outside,
    goal,
    peak,
    heat,
    BY_MASS: tl.constexpr,
    IDLE: tl.constexpr,
):
    """One pass over `values`: the part of `[low, high]` that holds the end of what is kept.

    A lane's values are at `lane + BLOCK * i`, those before `ends` and `count`. `above` is the
    weight of what is above `high`, `outside` of the part of it that `values` lack. Returned are
    the new `low`, `high` and `above`.
    """
    pivots = tl.minimum(tl.maximum(pivots, low + 1), high)
    tried = pivots.to(tl.int32)[:, None]
    parts = tl.zeros([WAYS, BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=3):
        found = _load(values, start + tl.arange(0, BLOCK), ends)
        reaches = _key(found, IDLE)[None, :] >= tried
        if BY_MASS:
            parts += tl.where(reaches, weigh(found, peak, heat)[None, :], 0.0)
        else:
            parts += tl.where(reaches, 1.0, 0.0)
    weights = tl.sum(parts.to(tl.float64), axis=1) + outside
    enough = weights >= goal
    above = tl.max(tl.where(enough, above, weights))
    low = tl.max(tl.where(enough, pivots, low))
    high = tl.min(tl.where(enough, high, pivots - 1))
    return low, high, above


@triton.jit
def _gather(logits, V, lists, slots, low, high, IDLE: tl.constexpr):
    """Copy the logits with keys in `[low, high]` to the list; how many there are in each lane.

    Each lane writes its own, `BLOCK` apart, so that none asks another for its place.
    """
    lanes = tl.arange(0, BLOCK)
    filled = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        values = _load(logits, start + lanes, V)
        keys = _key(values, IDLE)
        inside = (keys >= low.to(tl.int32)) & (keys <= high.to(tl.int32))
        tl.store(lists + filled * BLOCK + lanes, values, mask=inside & (filled < slots))
        filled += inside.to(tl.int32)
    tl.debug_barrier()  # a lane need not be the same thread's when it is read
    return filled


@triton.jit
def _search(logits, V, lists, slots, goal, peak, heat, BY_MASS: tl.constexpr, IDLE: tl.constexpr):
    """The logit of the last token with less than `goal` before it, and how many of those equal to
    it have that: one at least, V and more if all have."""
    goal = goal.to(tl.float64)
    none = goal * 0.0
    high = _key(peak, IDLE).to(tl.int64)
    low = high * 0 + (LOWEST >> IDLE)
    pivots = _sample_pivots(logits, V, IDLE)
    low, high, above = _narrow(
        logits, V, V, pivots, low, high, none, none, goal, peak, heat, BY_MASS, IDLE
    )
    if low < high:
        filled = _gather(logits, V, lists, slots, low, high, IDLE)
        most = tl.max(filled)
        ends = filled * BLOCK + tl.arange(0, BLOCK)
        rest = above
        while low < high:
            pivots = _spread_pivots(low, high)
            if most <= slots:
                values, count, outside = lists, most * BLOCK, rest
                low, high, above = _narrow(
                    values,
                    count,
                    ends,
                    pivots,
                    low,
                    high,
                    above,
                    outside,
                    goal,
                    peak,
                    heat,
                    BY_MASS,
                    IDLE,
                )
            else:
                low, high, above = _narrow(
                    logits, V, V, pivots, low, high, above, none, goal, peak, heat, BY_MASS, IDLE
                )
    end = _value(low.to(tl.int32), IDLE)
    room = goal - above
    if BY_MASS:
        room = tl.ceil(room / weigh(end, peak, heat).to(tl.float64))
    # A weight of 0 leaves room for all, or NaN.
    return end, tl.where(room < V, tl.maximum(room, 1.0), V * 1.0).to(tl.int32)


@triton.jit
def _tie_end(logits, V, end, equal):
    """One more than the id of the last of the first `equal` tokens whose logit is `end`."""
    found, before, start = equal * 0, equal * 0, equal * 0
    while (found < equal) & (start < V):
        before = found
        same = _load(logits, start + tl.arange(0, WIDE), V) == end
        found += tl.sum(same.to(tl.int32))
        start += WIDE
    ids = start - WIDE + tl.arange(0, WIDE)  # of the block that holds it
    same = _load(logits, ids, V) == end
    last = same & (before + tl.cumsum(same.to(tl.int32)) == equal)
    return tl.min(tl.where(last, ids + 1, V))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _threshold_kernel(
    logits,
    stride,
    temperature,
    top_k,
    top_p,
    min_p,
    lists,
    threshold,
    tie_end,
    V,
    slots,
    PDL: tl.constexpr,
    IDLE: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lists += row.to(tl.int64) * slots * BLOCK
    enter(PDL)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    fraction = tl.load(min_p + row)
    end = heat * 0 - INF
    equal = row * 0 + V
    if (heat > 0) & ((k < V) | (p < 1) | (fraction > 0)):
        peak = _peak(logits, V)
        if (peak > -INF) & (peak < INF):
            if k < V:
                end, equal = _search(logits, V, lists, slots, k, peak, heat, False, IDLE)
            if p < 1:
                # Of what top-k keeps; if that is all, `end` is -inf, which weighs nothing.
                goal = p.to(tl.float64) * _mass(logits, V, end, equal, peak, heat)
                tl.debug_barrier()  # the list is written again
                last, few = _search(logits, V, lists, slots, goal, peak, heat, True, IDLE)
                equal = tl.where(last > end, few, equal)
                equal = tl.where(last == end, tl.minimum(few, equal), equal)
                end = tl.maximum(last, end)
            if fraction > 0:
                least = tl.minimum(peak + heat * tl.log(fraction), peak)
                equal = tl.where(least > end, V, equal)
                end = tl.maximum(least, end)
            if equal < V:
                equal = _tie_end(logits, V, end, equal)
    tl.store(threshold + row, end)
    tl.store(tie_end + row, equal)


def find_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(threshold [B] float32, tie_end [B] int32)` of what `sampling.filter_probs` keeps of each
    row of `logits [B, V]` (float32, float16 or bfloat16).

    `temperature`, `top_p`, `min_p [B]` are float32, `top_k [B]` is int64, from 1. Off are a `top_k`
    of V and more, a `top_p` of 1 and a `min_p` of 0. A row without a filter, with temperature 0 or
    without a distribution gets (-inf, V). The most likely token is always kept.
    """
    check_logits(logits)
    size, vocab_size = logits.shape
    check_vectors(
        size,
        logits.device,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int64),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
    )
    threshold = torch.empty(size, dtype=torch.float32, device=logits.device)
    tie_end = torch.empty(size, dtype=torch.int32, device=logits.device)
    if not size:
        return threshold, tie_end
    block: int = BLOCK.value
    slots = vocab_size // (LIST_PART * block) + 2
    lists = torch.empty((size, slots, block), dtype=torch.float32, device=logits.device)
    _threshold_kernel[(size,)](
        logits,
        logits.stride(0),
        temperature,
        top_k,
        top_p,
        min_p,
        lists,
        threshold,
        tie_end,
        vocab_size,
        slots,
        **pdl(logits),
        IDLE=IDLE_BITS[logits.dtype],
        num_warps=16,
    )
    return threshold, tie_end
