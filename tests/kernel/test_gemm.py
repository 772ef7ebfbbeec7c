"""`invariant_linear`: its values against `F.linear`, its bits against those of other batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel.linear import linear
from minisgl.kernel.triton import gemm
from minisgl.kernel.triton.gemm import _TILES, invariant_linear


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device, dtype)


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        (1, 16, 64),
        (3, 40, 100),  # a tail of K, of the columns, and rows that don't fill a tile
        (70, 33, 64),  # two tiles of rows
        (65, 300, 32),  # several of columns
        (2, 1, 7),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_values(device: torch.device, rows: int, columns: int, size: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x = random(device, torch.float32, rows, size)
    weight = random(device, torch.float32, columns, size)
    bias = random(device, torch.float32, columns) if biased else None
    # Sums of `size` products in different orders: a few roundings of values of about sqrt(size).
    torch.testing.assert_close(
        invariant_linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_exact_where_every_sum_is(device: torch.device, dtype: torch.dtype) -> None:
    """Small integers: no rounding before the last, so that any right kernel gives these bits."""
    torch.manual_seed(0)
    x = torch.randint(-4, 5, (67, 80)).to(device, dtype)
    weight = torch.randint(-4, 5, (50, 80)).to(device, dtype)
    expected = (x.double() @ weight.double().T).to(dtype)
    assert torch.equal(invariant_linear(x, weight), expected)


def test_strided_rows_and_no_rows(device: torch.device) -> None:
    x = torch.randint(-4, 5, (5, 96)).to(device, torch.float32)[:, 32:]
    weight = torch.randint(-4, 5, (24, 64)).to(device, torch.float32)
    assert torch.equal(invariant_linear(x, weight), x @ weight.T)
    assert invariant_linear(x[:0], weight).shape == (0, 24)


def test_garbage_beside_the_operands_is_not_read(device: torch.device) -> None:
    """NaN follows every row and the last one: a tail read without a mask would spread it."""
    x = torch.full((8, 64), float("nan"), device=device)
    weight = torch.full((48, 40), float("nan"), device=device)
    x[:3, :40], weight[:20] = 1, 2
    assert torch.equal(invariant_linear(x[:3, :40], weight[:20]), x.new_full((3, 20), 80))


def test_all_tiles_add_in_one_order() -> None:
    assert len({tile.block_k for tile in _TILES}) == 1
    assert all(tile.block_m >= 64 and tile.num_warps in (4, 8) for tile in _TILES)


def test_errors(device: torch.device) -> None:
    x, weight = torch.zeros(2, 32, device=device), torch.zeros(16, 32, device=device)
    with pytest.raises(ValueError, match=r"x is \(2, 32\), weight \(16, 16\)"):
        invariant_linear(x, weight[:, :16])
    with pytest.raises(ValueError, match=r"torch.float32 on .*torch.float16"):
        invariant_linear(x, weight.half())
    with pytest.raises(ValueError, match="weight be contiguous"):
        invariant_linear(x[:, :16], weight[:, :16])
    with pytest.raises(ValueError, match=r"bias \(15,\)"):
        invariant_linear(x, weight, torch.zeros(15, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("columns", "size"),
    [(1024, 3072), (4096, 1024), (6144, 1024), (5120, 17408), (7168, 5120), (1000, 1000)],
)
def test_bits_do_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, columns: int, size: int
) -> None:
    """Also compares all tiles with each other: T and N between them choose every one."""
    torch.manual_seed(0)
    x = random(device, dtype, 1000, size)
    weight = random(device, dtype, columns, size)
    whole = invariant_linear(x, weight)
    exact = F.linear(x.double(), weight.double())
    # One rounding to the dtype, and the float32 sum's error, far below it in 16 bits.
    bound = max(torch.finfo(dtype).eps, 1e-5) * exact.abs().max()
    assert (whole.double() - exact).abs().max() <= bound
    for rows in (1, 8, 64, 256, 999):
        assert torch.equal(invariant_linear(x[:rows], weight), whole[:rows])
        assert torch.equal(invariant_linear(x[1000 - rows :], weight), whole[1000 - rows :])


@pytest.mark.parametrize("shared", [101_376, 167_936, 232_448])  # of an L4, an A100, an H100
def test_tiles_fit_the_device(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "shared_bytes", lambda device: shared)
    monkeypatch.setattr(gemm, "reads_shared", lambda device: shared > 200_000)
    x = torch.zeros(4096, 64, dtype=torch.bfloat16)
    for rows in (1, 64, 65, 4096):
        tile = gemm._choose(rows, 8192, x)
        stages = tile.num_stages - (shared < 200_000)
        assert stages * (tile.block_m + tile.block_n) * tile.block_k * 2 <= shared
    assert (gemm._choose(4096, 8192, x) == _TILES[0]) == (shared > 150_000)


@pytest.mark.parametrize("function", [linear, invariant_linear])
def test_results_go_where_they_are_told(device: torch.device, function) -> None:
    x = random(device, torch.float32, 5, 32)
    weight = random(device, torch.float32, 20, 32)
    buffer = torch.full((8, 20), float("nan"), device=device)
    assert function(x, weight, None, buffer[:5]).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:5], function(x, weight)) and buffer[5:].isnan().all()


def test_a_place_that_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = random(device, torch.float32, 5, 32), random(device, torch.float32, 20, 32)
    with pytest.raises(ValueError, match=r"out must be \(5, 20\)"):
        invariant_linear(x, weight, None, torch.empty(4, 20, device=device))
    with pytest.raises(ValueError, match="without a bias"):
        linear(x, weight, weight[:, 0], torch.empty(5, 20, device=device))
