"""One token for each row of logits, greedy or drawn, in two launches.

A row is cut into chunks of `CHUNK` ids. The first kernel reads all logits once and leaves of each
chunk the largest logit and, for a row that draws, the sum of exp((logit - largest) / temperature)
over what the filters keep. The second finds the chunk that holds the token, reads that chunk
again and finds the token in it:

    row      [ chunk 0 | chunk 1 | chunk 2 | ... ]      sums, as parts of the row's:  .5 .3 .2
    greedy   the first chunk whose largest is the row's; in it the first id with that logit
    drawn    u = 0.6 of the sum lies in chunk 1, 0.1 into its 0.3; in it the first id whose
             cumulative sum exceeds that

So the distribution is inverted in the order of ids, as `sampling.sample_from_probs` does. Sums
within a chunk are float32, of chunks float64, and in an order that depends on nothing but the
row: neither other rows nor their number change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import enter, pdl

__all__ = ["choose_tokens"]

CHUNK = 4096
# Slices of one upload: compiled once, wherever they start.
VECTORS = ["temperature", "threshold", "tie_end", "seeds", "positions", "choices", "tokens"]
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def weigh(values, peak, heat):
    """exp((values - peak) / heat), and 0 for -inf also where the peak is that."""
    base = tl.where(peak == -INF, 0.0, peak)
    return tl.exp2((values - base) * (LOG2E / heat))


@triton.jit
def _load_chunk(logits, stride, row, ids, V):
    line = logits + row.to(tl.int64) * stride
    return tl.load(line + ids, mask=ids < V, other=-INF).to(tl.float32)


@triton.jit
def _kept_weights(values, ids, peak, heat, row, threshold, tie_end, FILTERED: tl.constexpr):
    weights = weigh(values, peak, heat)
    if FILTERED:
        end = tl.load(threshold + row)
        kept = (values > end) | ((values == end) & (ids < tl.load(tie_end + row)))
        weights = tl.where(kept, weights, 0.0)
    return weights


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def _scan_kernel(
    logits,
    stride,
    temperature,
    threshold,
    tie_end,
    peaks,
    sums,
    V,
    PDL: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    place = row * tl.num_programs(0) + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    enter(PDL)
    values = _load_chunk(logits, stride, row, ids, V)
    heat = tl.load(temperature + row)
    peak = tl.max(values)
    tl.store(peaks + place, peak)
    if heat > 0:
        weights = _kept_weights(values, ids, peak, heat, row, threshold, tie_end, FILTERED)
        tl.store(sums + place, tl.sum(weights))


@triton.jit
def _uniform(seed, position, choice):
    """`sampling.philox_uniform`: key (seed low, high), counter (position low, high, choice, 0)."""
    none = tl.zeros_like(choice).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, _, _ = tl.philox(seed, low, high, (choice & 0xFFFFFFFF).to(tl.uint32), none)
    mantissa = (w0.to(tl.int64) << 21) ^ (w1.to(tl.int64) >> 11)
    return mantissa.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _greedy(logits, stride, row, tops, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The lowest id of the largest logit; 0 where NaN leaves none."""
    top = tl.max(tops)
    chunk = tl.min(tl.where(tops == top, tl.arange(0, CHUNKS), CHUNKS - 1))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = _load_chunk(logits, stride, row, ids, V)
    token = tl.min(tl.where(values == top, ids, V))
    return tl.where(token < V, token, 0)


@triton.jit
def _drawn(
    logits,
    stride,
    row,
    tops,
    sums,
    heat,
    uniform,
    threshold,
    tie_end,
    V,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The first id whose cumulative sum exceeds its part `uniform` of the whole.

    Never one whose weight is 0; of a row without a distribution (NaN, +inf, only -inf) it is 0.
    """
    places = tl.arange(0, CHUNKS)
    shares = weigh(tops, tl.max(tops), heat).to(tl.float64)
    masses = sums.to(tl.float64) * shares
    total = tl.sum(masses)
    goal = total * uniform
    passed = (tl.cumsum(masses) > goal) & (masses > 0)
    # Where rounding leaves none, here and below, it is the last with any weight.
    last = tl.max(tl.where(masses > 0, places, 0))
    chunk = tl.min(tl.where(passed, places, last))
    goal -= tl.sum(tl.where(places < chunk, masses, 0.0))
    goal /= tl.sum(tl.where(places == chunk, shares, 0.0))

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = _load_chunk(logits, stride, row, ids, V)
    peak = tl.sum(tl.where(places == chunk, tops, 0.0))
    weights = _kept_weights(values, ids, peak, heat, row, threshold, tie_end, FILTERED)
    passed = (tl.cumsum(weights.to(tl.float64)) > goal) & (weights > 0)
    last = tl.max(tl.where(weights > 0, ids, 0))
    token = tl.min(tl.where(passed, ids, last))
    return tl.where((total > 0) & (total < INF), token, 0)


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def _choose_kernel(
    logits,
    stride,
    temperature,
    seeds,
    positions,
    choices,
    threshold,
    tie_end,
    peaks,
    sums,
    tokens,
    V,
    num_chunks,
    PDL: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    places = tl.arange(0, CHUNKS)
    inside = places < num_chunks
    enter(PDL)
    heat = tl.load(temperature + row)
    tops = tl.load(peaks + row * num_chunks + places, mask=inside, other=-INF)
    if heat > 0:
        parts = tl.load(sums + row * num_chunks + places, mask=inside, other=0.0)
        uniform = _uniform(
            tl.load(seeds + row), tl.load(positions + row).to(tl.int64), tl.load(choices + row)
        )
        token = _drawn(
            logits,
            stride,
            row,
            tops,
            parts,
            heat,
            uniform,
            threshold,
            tie_end,
            V,
            FILTERED,
            CHUNK,
            CHUNKS,
        )
    else:
        token = _greedy(logits, stride, row, tops, V, CHUNK, CHUNKS)
    tl.store(tokens + row, token.to(tl.int64))


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    threshold: torch.Tensor | None = None,
    tie_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token for each row of `logits [B, V]` (float32, float16 or bfloat16): `[B]` int64.

    With `temperature [B]` float32 0 it is the lowest id of the largest logit. Else it is drawn as
    `sampling.sample_from_probs` does, by the random number of `sampling.philox_uniform` for
    `seeds`, `positions`, `choices [B]` int64, positions also int32 (not read for greedy rows).
    `threshold [B]` float32 and `tie_end [B]` int32 are what `find_thresholds` returned, or None:
    nobody filters. The row stride is free; the token of a row with a NaN is some valid id.
    """
    check_logits(logits)
    size, vocab_size = logits.shape
    check_vectors(
        size,
        logits.device,
        temperature=(temperature, torch.float32),
        seeds=(seeds, torch.int64),
        positions=(positions, torch.int32 if positions.dtype == torch.int32 else torch.int64),
        choices=(choices, torch.int64),
    )
    if (threshold is None) != (tie_end is None):
        raise ValueError("threshold and tie_end go together: one of them is None")
    if threshold is not None and tie_end is not None:
        check_vectors(
            size,
            logits.device,
            threshold=(threshold, torch.float32),
            tie_end=(tie_end, torch.int32),
        )
    tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
    if not size:
        return tokens
    chunks = triton.cdiv(vocab_size, CHUNK)
    peaks, sums = torch.empty((2, size, chunks), dtype=torch.float32, device=logits.device)
    common = {"FILTERED": threshold is not None, "CHUNK": CHUNK, **pdl(logits)}
    line = (logits, logits.stride(0), temperature)
    ends = (threshold, tie_end, peaks, sums)
    _scan_kernel[(chunks, size)](*line, *ends, vocab_size, **common, num_warps=4)
    _choose_kernel[(size,)](
        *line,
        seeds,
        positions,
        choices,
        *ends,
        tokens,
        vocab_size,
        chunks,
        **common,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return tokens


def check_logits(logits: torch.Tensor) -> None:
    """Whether the kernels can read these: rows `[B, V]`, each contiguous, of 16 or 32 bits."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits are {logits.dtype}: float32, float16 or bfloat16 is taken")
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: it must be [B, V], V above 0")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits have strides {logits.stride()}: rows must be contiguous")


def check_vectors(
    size: int, device: torch.device, **vectors: tuple[torch.Tensor, torch.dtype]
) -> None:
    """Whether each of these has `size` contiguous entries of the dtype beside it, on `device`."""
    for name, (vector, dtype) in vectors.items():
        found = (tuple(vector.shape), vector.dtype, vector.device)
        if found != ((size,), dtype, device) or not vector.is_contiguous():
            raise ValueError(
                f"{name} is {found[0]} {found[1]} on {found[2]} with strides {vector.stride()}: "
                f"it must be a contiguous [{size}] {dtype} on {device}"
            )
