"""A step's inputs and the work of its prefills, made on the device from a few numbers a request.

The host sends each request's row, the tokens it has keys for, and where its tokens lie in the
batch (`starts`); everything with one entry a token is made here, so that a captured graph can
begin with these kernels.

    starts     0        3  4        8            cached  5  9  0
    tokens     a0 a1 a2 b0 c0 c1 c2 c3 | pad     positions  5 6 7  9  0 1 2 3  | 0
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .prefill import PrefillPlan
from .runtime import enter, pdl

__all__ = ["fill_inputs", "plan_prefill", "receive", "scatter"]

_BLOCK = 256
_INT32, _INT64 = (torch.int32,), (torch.int64,)


def receive(
    staged: torch.Tensor, numbers: torch.Tensor, page_table: torch.Tensor, num_writes: int
) -> None:
    """Fetch what the host wrote for a step: `numbers`, then `num_writes` changes of the page table.

    `staged [>= n + 3 * num_writes]` int32 is pinned memory of the host, which the kernel reads over
    the bus: a copy engine would take longer to start. It holds the new `numbers [n]` int32, then
    rows, columns and pages of the changes, each place of `page_table` at most once.
    Raises `ValueError` for another dtype or layout, as all functions here do.
    """
    size = numbers.shape[0]
    _check(_INT32, size + 3 * num_writes, staged=staged)
    _check(_INT32, 1, numbers=numbers, page_table=page_table)
    copying = triton.cdiv(size, _BLOCK)
    _receive_kernel[(copying + triton.cdiv(num_writes, _BLOCK),)](
        staged,
        numbers,
        page_table,
        size,
        num_writes,
        page_table.stride(0),
        copying,
        BLOCK=_BLOCK,
        **pdl(numbers),
    )


@triton.jit(do_not_specialize=["size", "num_writes", "stride", "copying"])
def _receive_kernel(
    staged,
    numbers,
    page_table,
    size,
    num_writes,
    stride,
    copying,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    if tl.program_id(0) < copying:
        tl.store(numbers + i, tl.load(staged + i, mask=i < size), mask=i < size)
    else:
        i -= copying * BLOCK
        mask = i < num_writes
        row = tl.load(staged + size + i, mask=mask, other=0).to(tl.int64)
        column = tl.load(staged + size + num_writes + i, mask=mask, other=0)
        page = tl.load(staged + size + 2 * num_writes + i, mask=mask, other=0)
        tl.store(page_table + row * stride + column, page, mask=mask)


def fill_inputs(
    counts: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cached_lens: torch.Tensor,
    token_pool: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    dummy_page: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fill `out`: ids, positions and slots `[T]`, and each request's last row `[B]`, all int64.

    `counts [>= 3]` int32: requests that decode, all requests, tokens; `rows, cached_lens [B]` and
    `starts [B + 1]` int32; `token_pool [rows, max_len + 1]` and `page_table [rows, max_pages]`
    int32. Tokens beyond the last become token 0 at position 0 in the dummy page, requests beyond
    the last get row 0.
    """
    input_ids, positions, out_loc, last = out
    num_tokens, num_reqs = input_ids.shape[0], last.shape[0]
    _check(_INT32, 3, counts=counts)
    _check(_INT32, rows.shape[0], rows=rows, cached_lens=cached_lens)
    _check(_INT32, rows.shape[0] + 1, starts=starts)
    _check(_INT32, 1, token_pool=token_pool, page_table=page_table)
    _check(_INT64, num_tokens, input_ids=input_ids, positions=positions, out_loc=out_loc)
    _check(_INT64, num_reqs, last=last)
    _inputs_kernel[(triton.cdiv(max(num_tokens, num_reqs), _BLOCK),)](
        counts,
        rows,
        starts,
        cached_lens,
        token_pool,
        page_table,
        input_ids,
        positions,
        out_loc,
        last,
        num_tokens,
        num_reqs,
        token_pool.stride(0),
        page_table.stride(0),
        dummy_page * page_size,
        PAGE_SIZE=page_size,
        STEPS=rows.shape[0].bit_length(),
        BLOCK=_BLOCK,
        **pdl(counts),
    )


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "token_stride", "table_stride", "dummy_slot"]
)
def _inputs_kernel(
    counts,
    rows,
    starts,
    cached_lens,
    token_pool,
    page_table,
    input_ids,
    positions,
    out_loc,
    last,
    num_tokens,
    num_reqs,
    token_stride,
    table_stride,
    dummy_slot,
    PAGE_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    count = tl.load(counts + 1)
    valid = t < tl.load(counts + 2)
    # The request of token t, by bisection: starts[low] <= t < starts[high].
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(starts + middle, mask=valid, other=0) <= t
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    row = tl.load(rows + low, mask=valid, other=0).to(tl.int64)
    position = tl.load(cached_lens + low, mask=valid, other=0) + t
    position -= tl.load(starts + low, mask=valid, other=0)
    position = tl.where(valid, position, 0)
    token = tl.load(token_pool + row * token_stride + position, mask=valid, other=0)
    page = tl.load(page_table + row * table_stride + position // PAGE_SIZE, mask=valid, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(input_ids + t, token.to(tl.int64), mask=t < num_tokens)
    tl.store(positions + t, position.to(tl.int64), mask=t < num_tokens)
    tl.store(out_loc + t, tl.where(valid, slot, dummy_slot), mask=t < num_tokens)
    end = tl.load(starts + t + 1, mask=t < tl.minimum(count, num_reqs), other=1)
    tl.store(last + t, (end - 1).to(tl.int64), mask=t < num_reqs)


def plan_prefill(counts: torch.Tensor, plan: PrefillPlan, block_tokens: int) -> None:
    """List the blocks of `block_tokens` that the prefills' tokens make, in `plan.items`.

    `counts [>= 3]` int32 as for `fill_inputs`: the requests from the first that does not decode.
    """
    size = plan.rows.shape[0]
    _check(_INT32, 3, counts=counts)
    _check(_INT32, size + 1, starts=plan.starts)
    _check(_INT32, 1, num_items=plan.num_items)
    _check(_INT32, 2, items=plan.items)
    _plan_kernel[(1,)](
        counts,
        plan.starts,
        plan.items,
        plan.num_items,
        BLOCK=block_tokens,
        SIZE=triton.next_power_of_2(size),
        **pdl(counts),
    )


@triton.jit
def _plan_kernel(
    counts,
    starts,
    items,
    num_items,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    first = tl.load(counts)
    count = tl.load(counts + 1)
    b = tl.arange(0, SIZE)
    mine = (b >= first) & (b < count)
    begin = tl.load(starts + b, mask=mine, other=0)
    tokens = tl.load(starts + b + 1, mask=mine, other=0) - begin
    blocks = tl.cdiv(tokens, BLOCK)
    at = tl.cumsum(blocks, 0) - blocks
    tl.store(num_items, tl.sum(blocks))
    for i in range(0, tl.max(blocks, 0)):
        tl.store(items + 2 * (at + i), b, mask=i < blocks)
        tl.store(items + 2 * (at + i) + 1, b * 0 + i * BLOCK, mask=i < blocks)


def scatter(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
) -> None:
    """`table[rows[i], columns[i]] = values[i]` for integer tensors `[n]`; in one launch."""
    count = values.shape[0]
    _check(_INT32 + _INT64, 1, table=table)
    _check(_INT32 + _INT64, count, rows=rows, columns=columns, values=values)
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](
        table, rows, columns, values, count, table.stride(0), BLOCK=_BLOCK, **pdl(table)
    )


@triton.jit(
    do_not_specialize=["count", "stride"],
    do_not_specialize_on_alignment=["rows", "columns", "values"],
)
def _scatter_kernel(
    table, rows, columns, values, count, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    enter(PDL)
    row = tl.load(rows + i, mask=mask, other=0).to(tl.int64)
    column = tl.load(columns + i, mask=mask, other=0)
    value = tl.load(values + i, mask=mask, other=0)
    tl.store(table + row * stride + column, value.to(table.dtype.element_ty), mask=mask)


def _check(dtypes: tuple[torch.dtype, ...], size: int, **tensors: torch.Tensor) -> None:
    """The last dimension must be contiguous, of `size` or more. Runs every step: so it is short."""
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes or tensor.stride(-1) != 1 or tensor.shape[-1] < size:
            raise ValueError(
                f"{name} must be {' or '.join(map(str, dtypes))}, its last dimension contiguous "
                f"and >= {size}, got {tensor.dtype} {[*tensor.shape]} with strides "
                f"{[*tensor.stride()]}"
            )
