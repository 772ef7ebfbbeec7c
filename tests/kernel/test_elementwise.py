"""Triton's norms, gated activations and embedding against the references of `torch_ops`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl.kernel import torch_ops
from tests.helpers import assert_close

pytest.importorskip("triton")
from minisgl.kernel.triton import activation, embedding, norm  # noqa: E402
from minisgl.kernel.triton.runtime import INTERPRETED  # noqa: E402

EPS = 1e-6
# Two units in the last place, relative to 1 + |expected|, and some more in float32: sums are in
# another order, and an exponential or a square root may be off by a unit, so that a value near a
# rounding boundary goes to its neighbour, before and after the last product. The interpreter cuts
# bfloat16 off instead of rounding it.
RTOL = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5 if INTERPRETED else 2**-6}
DTYPES = list(RTOL)
QWEN3 = [(256, 1024), (256, 5120), (4099, 1024), (1, 5120)]


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        device, dtype
    )


def rounds(dtype: torch.dtype) -> bool:
    return not (INTERPRETED and dtype == torch.bfloat16)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str = "") -> None:
    assert ours.dtype == theirs.dtype, f"{what} {ours.dtype} != {theirs.dtype}"
    scale = 1 + theirs.double().abs()
    assert_close(ours / scale, theirs / scale, RTOL[ours.dtype], what)
    if ours.dtype != torch.float32 and rounds(ours.dtype):
        # The same roundings in the same places: of 1,000 elements less than one is off. With one
        # left out it is every fourth.
        differ = int((ours != theirs).sum())
        assert differ <= 1 + ours.numel() / 100, f"{what} {differ} of {ours.numel()} differ"


def check_norms(device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    """All three norms of `[rows, size]`."""
    x, residual = randn(device, 2, rows, size, dtype=dtype)
    weight = randn(device, size, dtype=dtype)
    expected = torch_ops.rmsnorm(x, weight, EPS)
    assert_near(norm.rmsnorm(x, weight, EPS), expected, "rmsnorm")
    inplace = x.clone()
    norm.rmsnorm_inplace(inplace, weight, EPS)
    assert_near(inplace, expected, "rmsnorm_inplace")

    ours, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    norm.fused_add_rmsnorm(*ours, weight, EPS)
    torch_ops.fused_add_rmsnorm(*theirs, weight, EPS)
    assert_near(ours[0], theirs[0], "fused_add_rmsnorm")
    # One rounded sum, which only the interpreter's bfloat16 gets wrong.
    if rounds(dtype):
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(device: torch.device, dtype: torch.dtype) -> None:
    """Several rows a program: 21 rows are no multiple of 8."""
    check_norms(device, 21, 96, dtype)


@pytest.mark.parametrize("rows, size", [(1, 1), (3, 7), (2, 1024), (3, 1500)])
def test_norms_of_other_sizes(device: torch.device, rows: int, size: int) -> None:
    check_norms(device, rows, size, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, size", QWEN3)
def test_norms_of_qwen3(device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    check_norms(device, rows, size, dtype)


def test_norms_of_no_rows(device: torch.device) -> None:
    weight = randn(device, 8)
    empty = torch.empty(0, 8, device=device)
    assert norm.rmsnorm(empty, weight, EPS).shape == (0, 8)
    norm.rmsnorm_inplace(empty, weight, EPS)
    norm.fused_add_rmsnorm(empty, empty.clone(), weight, EPS)


def test_norm_of_views(device: torch.device) -> None:
    """Heads of a merged projection: what lies beside them stays as it is."""
    merged = randn(device, 5, 10 * 16)
    weight = randn(device, 16)
    heads = merged.view(5, 10, 16)[:, 3:9]
    expected = merged.clone()
    torch_ops.rmsnorm_inplace(expected.view(5, 10, 16)[:, 3:9], weight, EPS)
    assert_near(norm.rmsnorm(heads, weight, EPS), expected.view(5, 10, 16)[:, 3:9])
    norm.rmsnorm_inplace(heads, weight, EPS)
    assert_near(merged, expected)
    assert torch.equal(merged[:, :48], expected[:, :48])
    assert torch.equal(merged[:, 144:], expected[:, 144:])


def test_add_norm_of_views(device: torch.device) -> None:
    x, residual = randn(device, 5, 40)[:, 3:35], randn(device, 5, 36)[:, 2:34]
    weight = randn(device, 32)
    expected = x.clone(), residual.clone()
    torch_ops.fused_add_rmsnorm(*expected, weight, EPS)
    norm.fused_add_rmsnorm(x, residual, weight, EPS)
    assert_near(x, expected[0])
    assert torch.equal(residual, expected[1])


def test_norm_rejects_what_it_cannot_take(device: torch.device) -> None:
    x, weight = randn(device, 4, 6, 8), randn(device, 8)
    with pytest.raises(ValueError, match=r"x is \(4, 6, 8\) torch.float32, weight \(7,\)"):
        norm.rmsnorm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match="torch.float16"):
        norm.rmsnorm(x, weight.half(), EPS)
    with pytest.raises(ValueError, match="not torch.float64"):
        norm.rmsnorm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match="last stride"):
        norm.rmsnorm(x.transpose(1, 2)[:, :, :4], weight[:4], EPS)
    with pytest.raises(ValueError, match="one stride"):
        norm.rmsnorm_inplace(x.view(2, 2, 6, 8).transpose(1, 2), weight, EPS)
    with pytest.raises(ValueError, match=r"residual \(3, 8\)"):
        norm.fused_add_rmsnorm(x[0], x[0, :3], weight, EPS)


Gated = Callable[[torch.Tensor], torch.Tensor]
GATED: list[tuple[Gated, Gated]] = [
    (activation.silu_and_mul, torch_ops.silu_and_mul),
    (activation.gelu_and_mul, torch_ops.gelu_and_mul),
    (activation.gelu_tanh_and_mul, torch_ops.gelu_tanh_and_mul),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ours, theirs", GATED)
def test_gated(device: torch.device, ours: Gated, theirs: Gated, dtype: torch.dtype) -> None:
    for shape in ((3, 2 * 100), (2, 2 * 1030), (2, 3, 2), (10,)):
        x = randn(device, *shape, dtype=dtype)
        assert_near(ours(x), theirs(x))
    x = randn(device, 4, 60, dtype=dtype)[:, 10:50]  # a view with its own row stride
    assert_near(ours(x), theirs(x))
    assert ours(x[:0]).shape == (0, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("ours, theirs", GATED)
@pytest.mark.parametrize("tokens, inner", [(256, 3072), (7, 17408), (4099, 3072)])
def test_gated_of_qwen3(
    device: torch.device, ours: Gated, theirs: Gated, tokens: int, inner: int
) -> None:
    x = randn(device, tokens, 2 * inner, dtype=torch.bfloat16)
    assert_near(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy tells what the GPU does silently
@pytest.mark.parametrize("ours, theirs", GATED)
def test_gated_of_large_gates(device: torch.device, ours: Gated, theirs: Gated) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1e30], device=device)
    x = torch.cat([gate, torch.ones_like(gate)])
    assert_near(ours(x), theirs(x))


def test_gated_rejects_what_it_cannot_take(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"\(4, 7\)"):
        activation.silu_and_mul(randn(device, 4, 7))
    with pytest.raises(ValueError, match="strides"):
        activation.silu_and_mul(randn(device, 4, 8).T)
    with pytest.raises(ValueError, match="strides"):
        activation.silu_and_mul(randn(device, 4, 8, 6)[:, :5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_indexing(device: torch.device, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    weight = randn(device, 9, 1030, dtype=dtype)
    ids = torch.tensor([0, 8, 3, 3, 7], dtype=ids_dtype, device=device)
    assert torch.equal(embedding.indexing(weight, ids), torch_ops.indexing(weight, ids))
    assert embedding.indexing(weight, ids[:0]).shape == (0, 1030)


@pytest.mark.parametrize("vocab_range", [(0, 10), (10, 10), (20, 3), (30, 0)])
def test_indexing_gives_zeros_outside_of_the_range(
    device: torch.device, vocab_range: tuple[int, int]
) -> None:
    """Rows that a rank only pads its part with are never given, whatever they hold."""
    weight = randn(device, 10, 24)
    weight[vocab_range[1] :] = float("nan")
    ids = torch.arange(-1, 26, device=device)
    expected = torch_ops.indexing(weight, ids, vocab_range)
    assert torch.equal(embedding.indexing(weight, ids, vocab_range), expected)


def test_indexing_without_rows_or_range(device: torch.device) -> None:
    """A rank beyond the vocabulary; and ids outside, which the reference rejects."""
    ids = torch.tensor([5, -1, 1], device=device)
    rows = embedding.indexing(torch.empty(0, 6, device=device), ids, (0, 0))
    assert torch.equal(rows, torch.zeros(3, 6, device=device))
    weight = randn(device, 3, 6)
    expected = torch.stack([weight[0] * 0, weight[0] * 0, weight[1]])
    assert torch.equal(embedding.indexing(weight, ids), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, hidden", [(256, 1024), (4099, 5120)])
def test_indexing_of_qwen3(device: torch.device, tokens: int, hidden: int) -> None:
    """A table of 151,936 rows: 5120 wide, its last rows are more than 2^31 bytes away."""
    weight = torch.randn(151_936, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 151_936, (tokens,), device=device)
    ids[0] = 151_935
    assert torch.equal(embedding.indexing(weight, ids), torch_ops.indexing(weight, ids))


def test_indexing_rejects_what_it_cannot_take(device: torch.device) -> None:
    weight, ids = randn(device, 4, 6), torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="torch.float32"):
        embedding.indexing(weight, ids.float())
    with pytest.raises(ValueError, match="strides"):
        embedding.indexing(weight.T, ids)
    with pytest.raises(ValueError, match="5 rows, weight 4"):
        embedding.indexing(weight, ids, (0, 5))
