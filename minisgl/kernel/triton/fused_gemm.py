"""Matrix products of decode batches, fused with what follows them.

With few tokens a product takes as long as its weight takes to arrive, and a launch costs as much
as a megabyte of it. So each kernel reads its weight once, with many loads under way, and does in
registers what would be another kernel: the residual's sum, the gated activation, or the heads'
norm, rotation and their way into the KV cache.

Programs that share rows of the weight have neighbouring ids: the first brings them to the L2
cache, the others find them there. A weight depends on no kernel, so that its loads need not wait
for the one before: `prefetch` asks for them ahead of that.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .gemm import Tile, check_product, dot_rows, prefetch_rows
from .norm import normalize
from .runtime import enter, has_pdl, num_sms, pdl

__all__ = ["linear", "linear_silu_mul", "qkv_norm_rope_store"]

_BLOCKS_M = (128, 64, 32, 16)
_BLOCKS_N = (128, 64, 32, 16)

_STAGE_BYTES = 32 * 1024
"""Both operands of one step along K: some five of them are under way at once."""

_PREFETCH_BYTES = 16 * 1024 * 1024
"""Of a launch's weight; more would drive activations and KV pages out of the L2 cache."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    prefetch: bool = True,
    config: Tile | None = None,
) -> torch.Tensor:
    """`x W^T + residual`, summed in float32 and rounded once.

    `x [T, K]` with any row stride, `weight [N, K]` contiguous, `residual` and `out` `[T, N]` with
    any row stride, all of one floating dtype; `out` may be `residual`. Returns `out`.
    Raises `ValueError` otherwise. `prefetch` and `config` change the speed only.
    """
    check_product(x, weight)
    rows, size = x.shape
    columns = weight.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            _check_rows(name, tensor, (rows, columns), x)
    if out.numel() == 0:
        return out
    tile = config or _choose(x, columns, _BLOCKS_N)
    _linear_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n),)](
        x,
        weight,
        residual,
        out,
        rows,
        columns,
        size,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        BLOCK_N=tile.block_n,
        **_launch(x, weight, tile, prefetch),
    )
    return out


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, *, prefetch: bool = True, config: Tile | None = None
) -> torch.Tensor:
    """`silu(x G^T) * (x U^T)` for `weight [2 I, K]`: the I rows of G, then those of U.

    `x [T, K]` with any row stride, of the weight's dtype; returns `[T, I]`. Both products, then
    the activation, are rounded to the dtype, as by `linear` and `torch_ops.silu_and_mul`.
    Raises `ValueError` for other shapes. `prefetch` and `config` change the speed only.
    """
    check_product(x, weight)
    if weight.shape[0] % 2:
        raise ValueError(f"weight must be [2 I, K], not {tuple(weight.shape)}")
    rows, size = x.shape
    inner = weight.shape[0] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = config or _choose(x, 2 * inner, _BLOCKS_N)
    _silu_mul_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(2 * inner, tile.block_n),)](
        x,
        weight,
        out,
        rows,
        inner,
        size,
        x.stride(0),
        BLOCK_N=tile.block_n,
        **_launch(x, weight, tile, prefetch),
    )
    return out


def qkv_norm_rope_store(
    x: torch.Tensor,
    weight: torch.Tensor,
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
    bias: torch.Tensor | None = None,
    *,
    prefetch: bool = True,
    config: Tile | None = None,
) -> torch.Tensor:
    """Project to query, key and value heads; norm and rotate the first two; store the last two.

    `x [T, K]`, `weight [(Hq + 2 Hk) D, K]`, `bias [(Hq + 2 Hk) D]`; `positions` and `out_loc`
    `[T]` integers; caches `[slots, Hk, D]` with any slot stride, written at `out_loc`;
    `cos_sin_cache [max_pos, D]` float32, cosines then sines; `q_weight` and `k_weight` `[D]`, or
    None for no norm. Returns the queries `[T, Hq, D]`. Raises `ValueError` otherwise, also when
    only a part of a head is rotated. `prefetch` and `config` (whose `block_n` isn't used: a
    program computes whole heads) change the speed only.

    Semantics: `linear`, then of `torch_ops` `rmsnorm_inplace`, `apply_rope_inplace`, `store_kv`;
    the rotation is rounded once, not at each of its products.
    """
    check_product(x, weight, bias)
    heads = num_qo_heads + 2 * num_kv_heads
    if weight.shape[0] != heads * head_dim or head_dim % 2:
        raise ValueError(
            f"weight must be [(Hq + 2 Hk) D, K] with an even D: it is {tuple(weight.shape)}, "
            f"Hq {num_qo_heads}, Hk {num_kv_heads}, D {head_dim}"
        )
    if cos_sin_cache.shape[1:] != (head_dim,) or cos_sin_cache.stride(-1) != 1:
        raise ValueError(
            "cos_sin_cache must be [max_pos, D], since all of a head is rotated here: "
            f"it is {tuple(cos_sin_cache.shape)}, D {head_dim}"
        )
    for name, ids in (("positions", positions), ("out_loc", out_loc)):
        if ids.shape != x.shape[:1] or not ids.is_contiguous() or ids.is_floating_point():
            raise ValueError(f"{name} must be {x.shape[0]} integers, not {tuple(ids.shape)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rows(name, cache, (cache.shape[0], num_kv_heads, head_dim), x)
    for name, norm in (("q_weight", q_weight), ("k_weight", k_weight)):
        if norm is not None:
            _check_rows(name, norm, (head_dim,), x)

    rows, size = x.shape
    q = torch.empty(rows, num_qo_heads, head_dim, dtype=x.dtype, device=x.device)
    if rows == 0:
        return q
    block_n = max(16, triton.next_power_of_2(head_dim))
    tile = config or _choose(x, heads * block_n, (block_n,))
    _qkv_kernel[(triton.cdiv(rows, tile.block_m) * heads,)](
        x,
        weight,
        bias,
        positions,
        out_loc,
        q,
        k_cache,
        v_cache,
        cos_sin_cache,
        q_weight,
        k_weight,
        eps,
        rows,
        size,
        x.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        cos_sin_cache.stride(0),
        HQ=num_qo_heads,
        HK=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_N=block_n,
        **_launch(x, weight, tile, prefetch),
    )
    return q


def _check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor) -> None:
    """That `tensor` is of this shape and of x's dtype; only its first stride may be any."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    loose = 1 if len(shape) > 1 else 0
    if tensor.shape != shape or tensor.dtype != x.dtype:
        raise ValueError(
            f"{name} must be {shape} {x.dtype}, not {tuple(tensor.shape)} {tensor.dtype}"
        )
    if list(tensor.stride())[loose:] != strides[loose:]:
        raise ValueError(f"{name} must have last strides {strides[loose:]}, not {tensor.stride()}")


def _choose(x: torch.Tensor, columns: int, blocks_n: tuple[int, ...]) -> Tile:
    """The tile by which the busiest multiprocessor has the fewest rows to load.

    The launch ends when that one has them: `block_m` rows of x and `block_n` of the weight's
    `columns` rows, for each of its programs.
    """
    if x.dtype == torch.float32:  # without tensor cores; small tiles keep it in registers
        return Tile(32, blocks_n[-1], 32, 4, 2)
    rows, size = x.shape
    # The same for all batches of a bucket, so that few kernels are compiled.
    bucket = max(16, triton.next_power_of_2(rows))

    def loaded(tile: tuple[int, int]) -> int:
        programs = triton.cdiv(bucket, tile[0]) * triton.cdiv(columns, tile[1])
        busiest: int = triton.cdiv(programs, num_sms(x.device))
        return busiest * sum(tile)

    tiles = [(m, n) for m in _BLOCKS_M if m <= bucket for n in blocks_n]
    block_m, block_n = min(tiles, key=loaded)
    row_bytes = (block_m + block_n) * x.element_size()
    block_k = 256
    while block_k > 64 and (block_k * row_bytes > _STAGE_BYTES or size % block_k):
        block_k //= 2
    stages = _shared_bytes(x.device) * 3 // 4 // (block_k * row_bytes)
    num_warps = 8 if block_m * block_n > 64 * 128 else 4
    return Tile(block_m, block_n, block_k, num_warps, min(6, max(2, stages)))


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; some number where kernels are interpreted."""
    if device.type != "cuda":
        return 1 << 16
    index = torch.cuda.current_device() if device.index is None else device.index
    count: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return count


def _launch(x: torch.Tensor, weight: torch.Tensor, tile: Tile, prefetch: bool) -> dict[str, object]:
    """The launch's constants that all three kernels take."""
    rows, size = weight.shape
    ahead = 0
    if prefetch and has_pdl(x.device):  # without it, the loads themselves come as early
        ahead = min(size * x.element_size(), _PREFETCH_BYTES // rows) // 1024 * 1024
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "EVEN_K": size % tile.block_k == 0,
        "PREFETCH": ahead,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **pdl(x),
    }


@triton.jit(do_not_specialize=["T"])
def _linear_kernel(
    x,
    weight,
    residual,
    out,
    T,
    N,
    K,
    x_stride,
    residual_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(T, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    column = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last, here and of x, are copies of it and not stored: loads need no mask.
    w_rows = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K
    prefetch_rows(w_rows, tile_m == 0, BLOCK_N, PREFETCH)
    enter(PDL)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x_rows = x + tl.minimum(row, T - 1).to(tl.int64) * x_stride
    acc = dot_rows(x_rows, w_rows, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    row = row.to(tl.int64)
    mask = (row < T) & (column < N)[None, :]
    if residual is not None:
        before = residual + row * residual_stride + column[None, :]
        acc += tl.load(before, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * out_stride + column[None, :], acc, mask=mask)


@triton.jit
def _split_pairs(values):
    """The even and the odd columns: in the layout of a product, neighbours are one thread's."""
    return tl.split(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)))


@triton.jit(do_not_specialize=["T"])
def _silu_mul_kernel(
    x,
    weight,
    out,
    T,
    inner,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(T, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    first = tl.program_id(0) // tiles_m * (BLOCK_N // 2)
    # The tile's rows of the weight: gate row, its up row, the next gate row, ...
    lane = tl.arange(0, BLOCK_N)
    w_row = tl.minimum(first + lane // 2, inner - 1) + lane % 2 * inner
    w_rows = weight + w_row.to(tl.int64)[:, None] * K
    prefetch_rows(w_rows, tile_m == 0, BLOCK_N, PREFETCH)
    enter(PDL)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x_rows = x + tl.minimum(row, T - 1).to(tl.int64) * x_stride
    acc = dot_rows(x_rows, w_rows, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    dtype = out.dtype.element_ty
    gate, up = _split_pairs(acc.to(dtype).to(tl.float32))
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    column = first + tl.arange(0, BLOCK_N // 2)[None, :]
    mask = (row < T) & (column < inner)
    tl.store(out + row.to(tl.int64) * inner + column, silu * up, mask=mask)


@triton.jit
def _norm_rope(first, second, norm, cos, sin, eps, lane, HALF: tl.constexpr, dtype: tl.constexpr):
    """Norm a head's two halves by the weight `norm` (unless None), then rotate them; float32."""
    if norm is not None:
        exists = lane < HALF
        square = tl.where(exists, first * first + second * second, 0)
        square_sum = tl.sum(square, axis=1, keep_dims=True)
        w_first = tl.load(norm + lane, mask=exists, other=0).to(tl.float32)
        w_second = tl.load(norm + HALF + lane, mask=exists, other=0).to(tl.float32)
        first = normalize(first, square_sum, w_first, eps, 2 * HALF, dtype)
        second = normalize(second, square_sum, w_second, eps, 2 * HALF, dtype)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["T"])
def _qkv_kernel(
    x,
    weight,
    bias,
    positions,
    out_loc,
    q,
    k_cache,
    v_cache,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    T,
    K,
    x_stride,
    k_stride,
    v_stride,
    cos_sin_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(T, BLOCK_M)
    tile_m = tl.program_id(0) % tiles_m
    head = tl.program_id(0) // tiles_m
    # The head's rows of the weight: each of its first half before the one it is rotated with.
    lane = tl.arange(0, BLOCK_N)
    w_row = head * 2 * HALF + tl.minimum(lane // 2, HALF - 1) + lane % 2 * HALF
    w_rows = weight + w_row.to(tl.int64)[:, None] * K
    prefetch_rows(w_rows, tile_m == 0, BLOCK_N, PREFETCH)
    enter(PDL)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    known_row = tl.minimum(row, T - 1).to(tl.int64)
    # Used only after the loop, but asked for here: they arrive meanwhile.
    position = tl.load(positions + known_row).to(tl.int64)
    slot = tl.load(out_loc + known_row).to(tl.int64)
    acc = dot_rows(x + known_row * x_stride, w_rows, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    if bias is not None:
        acc += tl.load(bias + w_row).to(tl.float32)[None, :]
    dtype = q.dtype.element_ty
    first, second = _split_pairs(acc.to(dtype).to(tl.float32))

    column = tl.arange(0, BLOCK_N // 2)[None, :]
    mask = (row < T) & (column < HALF)
    if head < HQ + HK:
        table = cos_sin + position * cos_sin_stride + column
        cos = tl.load(table, mask=mask, other=0).to(dtype).to(tl.float32)
        sin = tl.load(table + HALF, mask=mask, other=0).to(dtype).to(tl.float32)
        if head < HQ:
            first, second = _norm_rope(first, second, q_norm, cos, sin, eps, column, HALF, dtype)
            place = q + (known_row * HQ + head) * 2 * HALF + column
        else:
            first, second = _norm_rope(first, second, k_norm, cos, sin, eps, column, HALF, dtype)
            place = k_cache + slot * k_stride + (head - HQ) * 2 * HALF + column
    else:
        place = v_cache + slot * v_stride + (head - HQ - HK) * 2 * HALF + column
    tl.store(place, first, mask=mask)
    tl.store(place + HALF, second, mask=mask)
