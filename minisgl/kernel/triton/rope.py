"""Rotary position embeddings (RoPE), alone or fused with the QK-norm and the store of K and V.

A head is loaded as the two halves that are rotated into each other, and the rest that is not:

    0        rotary/2        rotary        D
    | first     | second        | rest     |       pairs (i, i + rotary/2); no rest if rotary is D

A program takes one token and some heads, a tile `[heads, columns]` for each of the parts. Every
product and sum is rounded to the dtype, in the reference's order, and no multiplication is fused
with an addition: the rotation has the reference's bits in every dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .norm import FLOATS, normalize
from .runtime import enter, pdl

__all__ = ["apply_rope_inplace", "qk_norm_rope_store"]

_MAX_GROUP = 8
"""Heads of a program: at a head size of 128, 16 bytes of fp16 or bf16 for each thread of 2 warps,
from either half. Common models have a multiple of 8 query heads, and at most 8 KV heads."""


def apply_rope_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate query and key by their positions, in place, pairing the two halves (NeoX).

    `positions [T]` int32 or int64, `query [T, Hq * D]` or `[T, Hq, D]` (key likewise; views with
    any strides but the last), `cos_sin_cache [max_pos, rotary_dim]` float32: cosines, then sines.
    Both are rounded to the activations' dtype. Dimensions of a head beyond `rotary_dim` are left
    alone. Raises `ValueError` for other shapes, dtypes or strides; positions are not checked.
    Semantics, bit for bit: `torch_ops.apply_rope_inplace`.
    Bytes moved: the rotated part of query and key read and written, and T rows of the table.
    """
    tokens = positions.shape[0]
    rotary = _check_table(cos_sin_cache, head_size)
    _check_per_token("positions", positions, tokens, (torch.int32, torch.int64))
    heads = []
    for name, x in (("query", query), ("key", key)):
        if x.dim() not in (2, 3) or x.shape[0] != tokens or x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be [{tokens}, H * D] or [{tokens}, H, D] with a last stride of 1: "
                f"shape {tuple(x.shape)}, strides {x.stride()}"
            )
        if x.dtype != query.dtype or x.dtype not in FLOATS or x.shape[-1] % head_size:
            raise ValueError(
                f"query and key must be of one dtype of {FLOATS}, with heads of {head_size}: "
                f"{name} is {tuple(x.shape)} {x.dtype}, query is {query.dtype}"
            )
        heads.append(x.unflatten(1, (-1, head_size)) if x.dim() == 2 else x)
    if tokens == 0:
        return
    q, k = heads
    half_block = triton.next_power_of_2(rotary // 2)
    group = _group(max(q.shape[1], k.shape[1]))
    groups = triton.cdiv(q.shape[1], group) + triton.cdiv(k.shape[1], group)
    _rope_kernel[(tokens, groups)](
        positions,
        q,
        k,
        cos_sin_cache,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin_cache.stride(0),
        Q_HEADS=q.shape[1],
        K_HEADS=k.shape[1],
        HALF=rotary // 2,
        HALF_BLOCK=half_block,
        GROUP=group,
        num_warps=_num_warps(group, half_block),
        enable_fp_fusion=False,
        **pdl(query),
    )


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """All that happens between the merged projection and attention, in one launch.

    `qkv [T, (Hq + 2 Hk) * D]` (any row stride), `positions [T]` and `out_loc [T]` int64, caches
    `[slots, Hk, D]` of qkv's dtype (any strides but the last), `cos_sin_cache [max_pos,
    rotary_dim]` float32, weights `[D]`, both or neither. Query heads are normed (if there are
    weights), rotated and written back into qkv; key heads the same, but written to slots `out_loc`
    of k_cache; value heads are copied to v_cache. K and V in qkv stay as they are. Slots may
    repeat where it doesn't matter which token is kept (padding's dummy slot). D is even and at
    most 256. Raises `ValueError` for other shapes, dtypes or strides; positions and slots are not
    checked. Semantics: `rmsnorm_inplace`, `apply_rope_inplace`, `store_kv` of `torch_ops`.
    Bytes moved: qkv read, and as much written: `2 * qkv.nbytes`, and T rows of the table.

    `positions` and `out_loc` are read while the kernel launched just before this one may still
    run: so that one must not be what writes them.
    """
    rotary = _check_table(cos_sin_cache, head_dim)
    tokens = _check_fused(qkv, k_cache, v_cache, num_qo_heads, num_kv_heads, head_dim)
    _check_per_token("positions", positions, tokens, (torch.int64,))
    _check_per_token("out_loc", out_loc, tokens, (torch.int64,))
    _check_weights(q_weight, k_weight, head_dim, qkv.dtype)
    if tokens == 0:
        return
    d_block = triton.next_power_of_2(head_dim)
    group = _group(max(num_qo_heads, num_kv_heads))
    groups = triton.cdiv(num_qo_heads, group) + triton.cdiv(num_kv_heads, group)
    _fused_kernel[(tokens, groups)](
        qkv,
        positions,
        out_loc,
        k_cache,
        v_cache,
        cos_sin_cache,
        q_weight,
        k_weight,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        cos_sin_cache.stride(0),
        eps,
        Q_HEADS=num_qo_heads,
        K_HEADS=num_kv_heads,
        D=head_dim,
        D_BLOCK=d_block,
        HALF=rotary // 2,
        HALF_BLOCK=triton.next_power_of_2(rotary // 2),
        REST_BLOCK=triton.next_power_of_2(head_dim - rotary) if rotary < head_dim else 0,
        GROUP=group,
        num_warps=_num_warps(group, d_block // 2),
        enable_fp_fusion=False,
        **pdl(qkv),
    )


def _group(heads: int) -> int:
    return int(min(_MAX_GROUP, triton.next_power_of_2(heads)))


def _num_warps(group: int, columns: int) -> int:
    """Warps of which each thread loads about 8 elements of half a head, `columns` wide."""
    return min(4, max(1, group * columns // 256))


def _check_table(cos_sin_cache: torch.Tensor, head_size: int) -> int:
    """The table's rotary_dim."""
    rotary: int = cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rotary % 2 or not 0 < rotary <= head_size:
        raise ValueError(
            "cos_sin_cache must be [max_pos, rotary_dim], rotary_dim even and at most the head "
            f"size of {head_size}: shape {tuple(cos_sin_cache.shape)}"
        )
    if cos_sin_cache.dtype != torch.float32 or cos_sin_cache.stride(1) != 1:
        raise ValueError(
            "cos_sin_cache must be float32 with a last stride of 1, not "
            f"{cos_sin_cache.dtype} with {cos_sin_cache.stride(1)}"
        )
    return rotary


def _check_per_token(
    name: str, x: torch.Tensor, tokens: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    if x.shape != (tokens,) or x.dtype not in dtypes or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [{tokens}] of {' or '.join(map(str, dtypes))}: "
            f"shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}"
        )


def _check_fused(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> int:
    """The number of tokens."""
    width = (num_qo_heads + 2 * num_kv_heads) * head_dim
    if head_dim % 2 or not 0 < head_dim <= 256:
        raise ValueError(f"head_dim must be even and at most 256, not {head_dim}")
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.dtype not in FLOATS:
        raise ValueError(
            f"qkv must be [T, {width}] of {FLOATS}, not {tuple(qkv.shape)} {qkv.dtype}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[1:] != (num_kv_heads, head_dim) or cache.dtype != qkv.dtype:
            raise ValueError(
                f"{name} must be [slots, {num_kv_heads}, {head_dim}] {qkv.dtype}, "
                f"not {tuple(cache.shape)} {cache.dtype}"
            )
    strides = qkv.stride(-1), k_cache.stride(-1), v_cache.stride(-1)
    if strides != (1, 1, 1):
        raise ValueError(f"The last strides of qkv, k_cache, v_cache must be 1, not {strides}")
    return qkv.shape[0]


def _check_weights(
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must both be given, or neither")
    for name, x in (("q_weight", q_weight), ("k_weight", k_weight)):
        if x is not None and (x.shape != (head_dim,) or x.dtype != dtype or x.stride(0) != 1):
            raise ValueError(
                f"{name} must be contiguous [{head_dim}] {dtype}, not {tuple(x.shape)} {x.dtype}"
            )


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Float32 x as dtype can hold it."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    source,
    target,
    held,
    table,
    weight,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Norm by weight unless it is None, rotate, and write to target, the heads held `[heads, 1]`.

    `source, target [heads, 1]` point to the heads, `table` to the position's cosines and sines.
    Dimensions from 2 HALF on are left out where REST_BLOCK is 0.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    # Repeated for each head: table and weight are then loaded in the layout of the heads, instead
    # of being exchanged through shared memory.
    column = tl.broadcast_to(tl.arange(0, HALF_BLOCK)[None, :], (source.shape[0], HALF_BLOCK))
    mask = held & (column < HALF)
    first = tl.load(source + column, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + HALF + column, mask=mask, other=0).to(tl.float32)
    cos = tl.load(table + column, mask=column < HALF, other=0).to(dtype).to(tl.float32)
    sin = tl.load(table + HALF + column, mask=column < HALF, other=0).to(dtype).to(tl.float32)
    if REST_BLOCK > 0:
        REST: tl.constexpr = 2 * HALF
        beyond = REST + tl.broadcast_to(
            tl.arange(0, REST_BLOCK)[None, :], (source.shape[0], REST_BLOCK)
        )
        rest_mask = held & (beyond < D)
        rest = tl.load(source + beyond, mask=rest_mask, other=0).to(tl.float32)
    if weight is not None:
        square_sum = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if REST_BLOCK > 0:
            square_sum += tl.sum(rest * rest, axis=1, keep_dims=True)
            weights = tl.load(weight + beyond, mask=beyond < D, other=0).to(tl.float32)
            rest = normalize(rest, square_sum, weights, eps, D, dtype)
        weights = tl.load(weight + column, mask=column < HALF, other=0).to(tl.float32)
        first = normalize(first, square_sum, weights, eps, D, dtype).to(dtype).to(tl.float32)
        weights = tl.load(weight + HALF + column, mask=column < HALF, other=0).to(tl.float32)
        second = normalize(second, square_sum, weights, eps, D, dtype).to(dtype).to(tl.float32)
    turned = _rounded(first * cos, dtype) - _rounded(second * sin, dtype)
    tl.store(target + column, turned, mask=mask)
    turned = _rounded(second * cos, dtype) + _rounded(first * sin, dtype)
    tl.store(target + HALF + column, turned, mask=mask)
    if REST_BLOCK > 0:
        tl.store(target + beyond, rest, mask=rest_mask)


@triton.jit
def _rope_kernel(
    positions,
    query,
    key,
    table,
    q_token,
    q_head,
    k_token,
    k_head,
    table_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    table += tl.load(positions + token).to(tl.int64) * table_stride
    Q_GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    if group < Q_GROUPS:
        head = group * GROUP + tl.arange(0, GROUP)[:, None]
        heads = query + token * q_token + head * q_head
        _rotate_heads(heads, heads, head < Q_HEADS, table, None, 0.0, 0, HALF, HALF_BLOCK, 0)
    else:
        head = (group - Q_GROUPS) * GROUP + tl.arange(0, GROUP)[:, None]
        heads = key + token * k_token + head * k_head
        _rotate_heads(heads, heads, head < K_HEADS, table, None, 0.0, 0, HALF, HALF_BLOCK, 0)


@triton.jit
def _fused_kernel(
    qkv,
    positions,
    out_loc,
    k_cache,
    v_cache,
    table,
    q_weight,
    k_weight,
    qkv_token,
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_stride,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    # Made by the step's first kernels, long ago: loaded while this kernel waits.
    table += tl.load(positions + token) * table_stride
    slot = tl.load(out_loc + token)
    enter(PDL)
    qkv += token * qkv_token
    Q_GROUPS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    if group < Q_GROUPS:
        head = group * GROUP + tl.arange(0, GROUP)[:, None]
        q = qkv + head * D
        held = head < Q_HEADS
        _rotate_heads(q, q, held, table, q_weight, eps, D, HALF, HALF_BLOCK, REST_BLOCK)
    else:
        head = (group - Q_GROUPS) * GROUP + tl.arange(0, GROUP)[:, None]
        held = head < K_HEADS
        column = tl.arange(0, D_BLOCK)[None, :]
        mask = held & (column < D)
        # Loaded before the keys are computed, so that both are on their way together.
        v = tl.load(qkv + (Q_HEADS + K_HEADS + head) * D + column, mask=mask)
        k = qkv + (Q_HEADS + head) * D
        k_out = k_cache + slot * k_slot + head * k_head
        _rotate_heads(k, k_out, held, table, k_weight, eps, D, HALF, HALF_BLOCK, REST_BLOCK)
        tl.store(v_cache + slot * v_slot + head * v_head + column, v, mask=mask)
