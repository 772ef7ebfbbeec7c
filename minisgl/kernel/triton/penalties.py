"""Penalties for repeated tokens, with the counts kept on the device.

Each row of the token pool has one int16 for each id of the vocabulary:

    bit 15       it is in the prompt
    bits 0-14    how often it is in the output, 32,767 at most

A request's row is filled from the token pool when it gets the row, and each sampled token is
added right behind the step that sampled it: no step counts again, nor waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernel import sampling

from .runtime import enter, pdl
from .sample import check_vectors

__all__ = ["add_tokens", "apply_penalties", "count_tokens", "new_counts"]

MOST = tl.constexpr(0x7FFF)
LARGEST = tl.constexpr(1e30)
BLOCK = 2048
TOKENS = 128


@triton.jit(do_not_specialize_on_alignment=["places", "rows", "penalties"])
def _apply_kernel(
    logits, stride, places, counts, rows, penalties, V, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.program_id(1)
    inside = ids < V
    enter(PDL)
    logits += tl.load(places + entry) * stride
    counts += tl.load(rows + entry) * V
    repetition = tl.load(penalties + entry * 3)
    presence = tl.load(penalties + entry * 3 + 1)
    frequency = tl.load(penalties + entry * 3 + 2)
    values = tl.load(logits + ids, mask=inside, other=0.0)
    held = tl.load(counts + ids, mask=inside, other=0).to(tl.int32)
    used = (held & MOST).to(tl.float32)
    scaled = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(held != 0, scaled, values)
    values = values - tl.where(used > 0, presence, 0.0) - frequency * used
    tl.store(logits + ids, tl.minimum(tl.maximum(values, -LARGEST), LARGEST), mask=inside)


@triton.jit(
    do_not_specialize=["number"], do_not_specialize_on_alignment=["rows", "tokens", "places"]
)
def _add_kernel(counts, rows, tokens, places, V, number, PDL: tl.constexpr, TOKENS: tl.constexpr):
    entries = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = entries < number
    enter(PDL)
    row = tl.load(rows + entries, mask=inside, other=0)
    place = tl.load(places + entries, mask=inside, other=0)
    counts += row * V + tl.load(tokens + place, mask=inside, other=0)
    held = tl.load(counts, mask=inside, other=0).to(tl.int32)
    held += tl.where((held & MOST) < MOST, 1, 0)
    tl.store(counts, held.to(tl.int16), mask=inside)


def new_counts(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Counts for `rows` of the token pool, of no token yet: `[rows, V]` int16."""
    return torch.zeros((rows, vocab_size), dtype=torch.int16, device=device)


def count_tokens(
    counts: torch.Tensor, token_pool: torch.Tensor, row: int, prompt_len: int, total_len: int
) -> None:
    """Count anew what `token_pool [rows, L]` int32 holds in `row`: `prompt_len` tokens of prompt,
    and output up to `total_len`. Once a request, by torch."""
    vocab_size = counts.shape[1]
    tokens = token_pool[row : row + 1, :total_len].long()
    prompt = sampling.token_counts(tokens[:, :prompt_len], vocab_size)[0]
    output = sampling.token_counts(tokens[:, prompt_len:], vocab_size)[0].clamp(max=MOST.value)
    counts[row] = torch.where(prompt > 0, output - 0x8000, output).to(torch.int16)


def apply_penalties(
    logits: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """`sampling.apply_penalties` in place, on the rows `places [c]` of `logits [B, V]` float32.

    Their tokens are those counted in `rows [c]` of `counts [rows, V]`, both int64, and `penalties
    [c, 3]` float32 are repetition, presence and frequency.
    """
    number, vocab_size = places.shape[0], logits.shape[1]
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} with strides {logits.stride()}: they must be float32, and "
            f"rows contiguous"
        )
    _check(counts, vocab_size, number, places=places, rows=rows)
    if penalties.dtype != torch.float32 or penalties.shape != (number, 3):
        raise ValueError(
            f"penalties are {tuple(penalties.shape)} {penalties.dtype}: they must be "
            f"[{number}, 3] float32"
        )
    if number:
        grid = (triton.cdiv(vocab_size, BLOCK), number)
        _apply_kernel[grid](
            logits,
            logits.stride(0),
            places,
            counts,
            rows,
            penalties.contiguous(),
            vocab_size,
            **pdl(logits),
            BLOCK=BLOCK,
        )


def add_tokens(
    counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor
) -> None:
    """Count the `tokens [B]` int64 at `places [c]` as output of `rows [c]` of `counts`, each row
    at most once."""
    number = places.shape[0]
    _check(counts, counts.shape[1], number, places=places, rows=rows)
    check_vectors(tokens.shape[0], counts.device, tokens=(tokens, torch.int64))
    if number:
        _add_kernel[(triton.cdiv(number, TOKENS),)](
            counts,
            rows,
            tokens,
            places,
            counts.shape[1],
            number,
            **pdl(counts),
            TOKENS=TOKENS,
        )


def _check(counts: torch.Tensor, vocab_size: int, number: int, **vectors: torch.Tensor) -> None:
    if counts.dtype != torch.int16 or counts.shape[1:] != (vocab_size,):
        raise ValueError(
            f"counts are {tuple(counts.shape)} {counts.dtype}: they must be [rows, {vocab_size}] "
            f"int16"
        )
    if not counts.is_contiguous():
        raise ValueError(f"counts have strides {counts.stride()}: they must be contiguous")
    for name, vector in vectors.items():
        check_vectors(number, counts.device, **{name: (vector, torch.int64)})
