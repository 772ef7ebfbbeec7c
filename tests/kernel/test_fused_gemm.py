"""Fused matrix products of decode batches, against the sequences of ops that they replace."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel import torch_ops
from minisgl.kernel.triton.fused_gemm import linear, linear_silu_mul, qkv_norm_rope_store
from minisgl.kernel.triton.gemm import Tile

TOLERANCE = {
    torch.float32: 2e-5,  # sums of some hundred products in different orders
    torch.float16: 4e-3,  # four roundings of values of about 1
    torch.bfloat16: 3e-2,
}
EPS = 1e-6


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers, scaled so that a product over the last dimension is of about 1."""
    return (torch.randn(shape) / math.sqrt(math.sqrt(shape[-1]))).to(device, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize(("columns", "size"), [(48, 64), (33, 100), (5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, size: int
) -> None:
    torch.manual_seed(rows)
    x, weight = random(device, dtype, rows, size), random(device, dtype, columns, size)
    residual = random(device, dtype, rows, columns)
    close(linear(x, weight), F.linear(x.float(), weight.float()).to(dtype))
    expected = (F.linear(x.float(), weight.float()) + residual.float()).to(dtype)
    close(linear(x, weight, residual), expected)
    # In place, in rows that are a part of longer ones.
    wide = torch.full((rows, columns + 3), float("nan"), device=device, dtype=dtype)
    wide[:, :columns] = residual
    assert linear(x, weight, wide[:, :columns], wide[:, :columns]).data_ptr() == wide.data_ptr()
    close(wide[:, :columns], expected)
    assert wide[:, columns:].isnan().all()


@pytest.mark.parametrize("tile", [Tile(16, 32, 64, 4, 3), Tile(64, 16, 32, 4, 2)])
def test_every_tile_gives_the_same(device: torch.device, tile: Tile) -> None:
    """Of small integers, whose sums are exact in any order; NaN lies beyond each operand."""
    x = torch.full((40, 160), float("nan"), device=device)
    weight = torch.full((60, 96), float("nan"), device=device)
    x[:33, :96] = torch.randint(-4, 5, (33, 96))
    weight[:50] = torch.randint(-4, 5, (50, 96))
    x, weight = x[:33, :96], weight[:50]
    assert torch.equal(linear(x, weight, config=tile), x @ weight.T)
    expected = torch_ops.silu_and_mul(x @ weight.T)
    close(linear_silu_mul(x, weight, config=tile), expected)


@pytest.mark.parametrize("rows", [1, 18, 65])
@pytest.mark.parametrize(("inner", "size"), [(48, 64), (19, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_silu_mul(
    device: torch.device, dtype: torch.dtype, rows: int, inner: int, size: int
) -> None:
    torch.manual_seed(rows)
    x, weight = random(device, dtype, rows, size), random(device, dtype, 2 * inner, size)
    expected = torch_ops.silu_and_mul(F.linear(x.float(), weight.float()).to(dtype))
    close(linear_silu_mul(x, weight), expected)


def test_silu_of_large_values_is_finite(device: torch.device) -> None:
    """exp(-gate) overflows float32 where gate is far below 0."""
    x, weight = torch.full((1, 16), 10.0, device=device), torch.ones(2, 16, device=device)
    weight[0] = -1
    assert torch.equal(linear_silu_mul(x, weight), torch.zeros(1, 1, device=device))


def check_qkv(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int, int],
    size: int,
    normed: bool = True,
    biased: bool = False,
) -> None:
    """The kernel and the sequence of references, from the same operands."""
    num_qo, num_kv, head_dim = heads
    columns = (num_qo + 2 * num_kv) * head_dim
    x, weight = random(device, dtype, rows, size), random(device, dtype, columns, size)
    bias = random(device, dtype, columns) if biased else None
    q_weight = (1 + 0.1 * torch.randn(head_dim)).to(device, dtype) if normed else None
    k_weight = (1 + 0.1 * torch.randn(head_dim)).to(device, dtype) if normed else None
    angles = torch.rand(50, head_dim // 2) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    positions = torch.randint(0, 50, (rows,), device=device)
    slots = torch.randperm(rows + 20, device=device)[:rows]

    merged = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    q, k, v = merged.to(dtype).split([num_qo * head_dim, num_kv * head_dim, num_kv * head_dim], 1)
    q, k = q.reshape(rows, num_qo, head_dim), k.reshape(rows, num_kv, head_dim)
    if q_weight is not None and k_weight is not None:
        torch_ops.rmsnorm_inplace(q, q_weight, EPS)
        torch_ops.rmsnorm_inplace(k, k_weight, EPS)
    torch_ops.apply_rope_inplace(positions, q, k, head_dim, table)

    # Slots of two pools side by side: those of one have the other's between them.
    pool = torch.full((rows + 20, 2, num_kv, head_dim), float("nan"), device=device, dtype=dtype)
    k_cache, v_cache = pool.unbind(1)
    fused = qkv_norm_rope_store(
        x, weight, positions, slots, k_cache, v_cache, table, *heads, q_weight, k_weight, EPS, bias
    )
    close(fused, q)
    close(k_cache[slots], k)
    close(v_cache[slots], v.reshape(rows, num_kv, head_dim))
    free = torch.ones(rows + 20, dtype=torch.bool, device=device)
    free[slots] = False
    assert pool[free].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_qkv(device: torch.device, dtype: torch.dtype, normed: bool, biased: bool) -> None:
    torch.manual_seed(0)
    check_qkv(device, dtype, 19, (4, 2, 32), 64, normed, biased)


@pytest.mark.parametrize(
    ("rows", "heads", "size"),
    [
        (1, (2, 1, 16), 16),
        (5, (3, 1, 80), 72),  # a head of no power of 2, a tail of K
        (33, (1, 1, 8), 32),  # heads shorter than a tile; two tiles of rows
        (2, (2, 2, 128), 40),
    ],
)
def test_qkv_shapes(
    device: torch.device, rows: int, heads: tuple[int, int, int], size: int
) -> None:
    torch.manual_seed(1)
    check_qkv(device, torch.float32, rows, heads, size)


def test_no_rows(device: torch.device) -> None:
    x, weight, ids = x_weight_ids(device)
    cache, table = torch.zeros(4, 1, 16, device=device), torch.zeros(9, 16, device=device)
    assert linear(x[:0], weight).shape == (0, 64)
    assert linear_silu_mul(x[:0], weight).shape == (0, 32)
    q = qkv_norm_rope_store(x[:0], weight, ids[:0], ids[:0], cache, cache, table, 2, 1, 16)
    assert q.shape == (0, 2, 16)


def x_weight_ids(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three rows, a weight of 2 + 2 heads of 16, and three ids."""
    x, weight = torch.zeros(3, 32, device=device), torch.zeros(64, 32, device=device)
    return x, weight, torch.arange(3, device=device)


def test_errors(device: torch.device) -> None:
    x, weight, ids = x_weight_ids(device)
    with pytest.raises(ValueError, match=r"residual must be \(3, 64\).*not \(3, 63\)"):
        linear(x, weight, torch.zeros(3, 63, device=device))
    with pytest.raises(ValueError, match=r"out must be .*float32, not .*float16"):
        linear(x, weight, out=torch.zeros(3, 64, device=device, dtype=torch.float16))
    with pytest.raises(ValueError, match="out must have last strides"):
        linear(x, weight, out=torch.zeros(64, 3, device=device).T)
    with pytest.raises(ValueError, match=r"\[2 I, K\], not \(63, 32\)"):
        linear_silu_mul(x, weight[:63])

    cache, table = torch.zeros(4, 1, 16, device=device), torch.zeros(9, 16, device=device)
    with pytest.raises(ValueError, match="all of a head is rotated"):
        qkv_norm_rope_store(x, weight, ids, ids, cache, cache, table[:, :8], 2, 1, 16)
    with pytest.raises(ValueError, match=r"\(64, 32\), Hq 3, Hk 1, D 16"):
        qkv_norm_rope_store(x, weight, ids, ids, cache, cache, table, 3, 1, 16)
    with pytest.raises(ValueError, match="positions must be 3 integers"):
        qkv_norm_rope_store(x, weight, ids[:2], ids, cache, cache, table, 2, 1, 16)
    with pytest.raises(ValueError, match=r"v_cache must be \(4, 1, 16\)"):
        qkv_norm_rope_store(x, weight, ids, ids, cache, cache[..., :8], table, 2, 1, 16)
    with pytest.raises(ValueError, match=r"k_weight must be \(16,\)"):
        norm = torch.ones(16, device=device)
        qkv_norm_rope_store(x, weight, ids, ids, cache, cache, table, 2, 1, 16, norm, norm[:8])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 100, 256, 700])
@pytest.mark.parametrize(("hidden", "inner", "num_qo"), [(1024, 3072, 16), (5120, 17408, 40)])
def test_sizes_of_models(
    device: torch.device, rows: int, hidden: int, inner: int, num_qo: int
) -> None:
    """Qwen3-0.6B and 14B."""
    torch.manual_seed(rows)
    dtype = torch.bfloat16
    x, down = random(device, dtype, rows, inner), random(device, dtype, hidden, inner)
    residual = random(device, dtype, rows, hidden)
    expected = F.linear(x.float(), down.float()) + residual.float()
    close(linear(x, down, residual), expected.to(dtype))
    x, gate_up = random(device, dtype, rows, hidden), random(device, dtype, 2 * inner, hidden)
    expected = torch_ops.silu_and_mul(F.linear(x.float(), gate_up.float()).to(dtype))
    close(linear_silu_mul(x, gate_up), expected)
    check_qkv(device, dtype, rows, (num_qo, 8, 128), hidden)
