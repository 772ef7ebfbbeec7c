"""Rows of an embedding table, of which a rank may hold a part."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .runtime import enter, pdl

__all__ = ["indexing"]

_BLOCK = 1024
"""Columns of a program: 16 bytes of fp16 or bf16 for each thread of 4 warps."""


def indexing(
    weight: torch.Tensor, ids: torch.Tensor, vocab_range: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows `ids [T]` (int32 or int64) of `weight [n, hidden]`, as `[T, hidden]`.

    With `vocab_range = (start, length)`, `weight` holds the vocabulary's rows
    `start .. start + length - 1`, none of them where length is 0; without it, all n. Ids outside
    give zeros. Raises `ValueError` for other shapes, dtypes or strides.
    Semantics: `torch_ops.indexing`, which without a range rejects ids outside.
    Bytes moved: T rows read and written: `2 * T * hidden * itemsize`, and the ids.
    """
    if weight.dim() != 2 or weight.stride(1) != 1:
        raise ValueError(
            f"weight must be [n, hidden] with a last stride of 1: shape {tuple(weight.shape)}, "
            f"strides {weight.stride()}"
        )
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ValueError(
            f"ids must be contiguous [T] int32 or int64: shape {tuple(ids.shape)}, "
            f"strides {ids.stride()}, {ids.dtype}"
        )
    start, length = vocab_range or (0, weight.shape[0])
    if not 0 <= length <= weight.shape[0]:
        raise ValueError(f"vocab_range has {length} rows, weight {weight.shape[0]}")
    hidden = weight.shape[1]
    out = torch.empty((ids.shape[0], hidden), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    _indexing_kernel[(ids.shape[0], triton.cdiv(hidden, _BLOCK))](
        weight, ids, out, start, length, weight.stride(0), hidden, BLOCK=_BLOCK, **pdl(weight)
    )
    return out


@triton.jit(do_not_specialize=["start", "length"])
def _indexing_kernel(
    weight, ids, out, start, length, weight_stride, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    row = tl.load(ids + token).to(tl.int64) - start
    held = (row >= 0) & (row < length)
    values = tl.load(weight + row * weight_stride + column, mask=mask & held, other=0)
    tl.store(out + token * hidden + column, values, mask=mask)
