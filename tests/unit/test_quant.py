"""The block formats: against the gguf package bit for bit, and how far quantizing is off."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type

from minisgl.kernel.quant import BLOCKS, dequantize, quant_indexing, quant_linear, quantize

KINDS = list(BLOCKS)


def random_blocks(kind: str, rows: int, per_row: int, low: int = 0, high: int = 256) -> np.ndarray:
    """Rows of random bytes; from 60 up, f16 scales may be huge, infinite or NaN."""
    shape = (rows, per_row * BLOCKS[kind].nbytes)
    return np.random.default_rng(rows).integers(low, high, shape, dtype=np.uint8)


def reference(blocks: np.ndarray, kind: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks, Type[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_gguf_package(kind):
    assert tuple(BLOCKS[kind]) == gguf.GGML_QUANT_SIZES[Type[kind]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (7, 3), (2000, 2)])
def test_dequantize_is_the_gguf_package_s_for_any_bytes(kind, rows, per_row):
    blocks = random_blocks(kind, rows, per_row)
    expected = reference(blocks, kind)
    found = dequantize(torch.from_numpy(blocks), kind)
    assert found.shape == (rows, per_row * BLOCKS[kind].values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if rows == 2000:  # the random f16 scales were extreme indeed
        assert expected.isnan().any()
        assert expected.nan_to_num(0, 0, 0).abs().max() > 1e5


def test_dequantize_reads_rows_of_a_larger_tensor():
    blocks = torch.from_numpy(random_blocks("Q6_K", 9, 2))
    every = dequantize(blocks, "Q6_K")
    torch.testing.assert_close(
        dequantize(blocks[1::2], "Q6_K"), every[1::2], rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(
        dequantize(blocks[:, 210:], "Q6_K"), every[:, 256:], rtol=0, atol=0, equal_nan=True
    )


def test_q8_0_is_off_by_half_a_step_at_most():
    weight = torch.randn(300, 96) * torch.logspace(-4, 4, 300).unsqueeze(1)
    blocks = quantize(weight, "Q8_0")
    assert blocks.shape == (300, 3 * 34)
    largest = weight.view(-1, 32).abs().amax(1, keepdim=True)
    error = (dequantize(blocks, "Q8_0") - weight).view(-1, 32).abs()
    # A scale of 1e-4 / 127 is a subnormal f16, whose own rounding (2^-25) counts 127 times.
    assert (error <= largest / 127 * 0.501 + 127 * 2**-25).all()


@pytest.mark.parametrize("draw", ["normal", "laplace"])
def test_q4_1_is_clearly_closer_than_by_smallest_and_largest_weight(draw):
    """Which is how the gguf package does it; also in each block nearly so."""
    torch.manual_seed(0)
    weight = torch.randn(500, 256) + 0.3
    if draw == "laplace":
        weight = torch.distributions.Laplace(0.1, 2.0).sample((500, 256))
    plain = reference(gguf.quants.quantize(weight.numpy(), Type.Q4_1), "Q4_1") - weight
    ours = dequantize(quantize(weight, "Q4_1"), "Q4_1") - weight
    assert ours.square().mean() < 0.82 * plain.square().mean()
    per_block = [e.view(-1, 32).square().sum(1) for e in (ours, plain)]
    assert (per_block[0] <= per_block[1] * 1.01).float().mean() > 0.99
    # Hardly any weight lies outside the range of 16 steps by more than one of them.
    low, high = weight.view(-1, 32).aminmax(dim=1, keepdim=True)
    assert (ours.view(-1, 32).abs() <= 1.5 * (high - low) / 14).all()


@pytest.mark.parametrize("most", [14, 15])
def test_q4_1_weights_that_are_blocks_already_come_back(most):
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, most + 1, (2000, 32), generator=generator).float()
    q[:, 3], q[:, 30] = 0, most  # both extremes in each block
    scale = torch.rand(2000, 1, generator=generator).half().float() + 2**-10
    offset = torch.randn(2000, 1, generator=generator).half().float() * 8
    weight = scale.half() * q + offset
    back = dequantize(quantize(weight, "Q4_1"), "Q4_1")
    torch.testing.assert_close(back, weight, rtol=1e-6, atol=1e-5)  # of weights up to 30
    assert (back == weight).float().mean() > 0.99
    # Rounded to bfloat16, as a checkpoint might have them, they lose no more than that.
    half = weight.bfloat16().float()
    error = (dequantize(quantize(half, "Q4_1"), "Q4_1") - weight).square().mean()
    assert error < (half - weight).square().mean()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantize_does_not_depend_on_what_stands_beside_a_row(kind):
    weight = torch.randn(70, 32 * 1024)  # several pieces
    every = quantize(weight, kind)
    assert torch.equal(every, torch.cat([quantize(row[None], kind) for row in weight]))
    assert torch.equal(every, quantize(weight.t().contiguous().t(), kind))
    half = weight.bfloat16()
    assert torch.equal(quantize(half, kind), quantize(half.float(), kind))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_extreme_weights(kind):
    def back(weight: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(weight, kind), kind)

    assert torch.equal(back(torch.zeros(2, 64)), torch.zeros(2, 64))
    for tiny in (1e-42, 1e-38, 1e-12):  # scales that are 0 in f16
        assert torch.equal(back(torch.full((1, 32), tiny)), torch.zeros(1, 32))
    alone = torch.zeros(1, 32)
    alone[0, 17] = -3.0
    # Q4_1 also rounds the offset: of d q + m, no sum is 0.
    near = 0 if kind == "Q8_0" else 3 * 2**-11
    torch.testing.assert_close(back(alone), alone, rtol=2**-11, atol=near)
    large = torch.linspace(-6e4, 6e4, 32)[None]
    torch.testing.assert_close(back(large), large, rtol=0, atol=4000 if kind == "Q4_1" else 240)
    same = torch.full((1, 32), 0.3)  # no range at all
    torch.testing.assert_close(back(same), same, rtol=2**-8, atol=0)
    for bad in (float("nan"), float("inf"), -float("inf"), 1e8):
        weight = torch.randn(3, 64)
        weight[1, 40] = bad
        with pytest.raises(ValueError, match="not finite, or too large for a scale in f16"):
            quantize(weight, kind)


def test_what_is_no_matrix_of_blocks_is_refused():
    with pytest.raises(ValueError, match="Can't quantize to 'Q4_K': choose from Q8_0, Q4_1"):
        quantize(torch.randn(2, 256), "Q4_K")
    with pytest.raises(ValueError, match=r"a K that 32 divides, not \(2, 40\)"):
        quantize(torch.randn(2, 40), "Q8_0")
    with pytest.raises(ValueError, match=r"uint8 \[rows, n \* 34\], not torch.uint8 \(2, 35\)"):
        dequantize(torch.zeros(2, 35, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ValueError, match="'Q5_K' is no block format"):
        dequantize(torch.zeros(2, 176, dtype=torch.uint8), "Q5_K")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ops_are_those_of_the_dequantized_weights(kind, dtype):
    rows, width = 5000, 256  # more than one piece of rows
    per_row = width // BLOCKS[kind].values
    blocks = torch.from_numpy(random_blocks(kind, rows, per_row, high=50))
    weight = dequantize(blocks, kind).to(dtype)
    x = torch.randn(3, width, dtype=dtype)
    expected, found = F.linear(x, weight), quant_linear(x, blocks, kind)
    # The same products, maybe summed in another order: relative to what is summed.
    scale = F.linear(x.abs().float(), weight.abs().float())
    eps = torch.finfo(dtype).eps
    assert ((found.float() - expected.float()).abs() <= 4 * eps * scale).all()
    ids = torch.tensor([4999, 0, 17, 17])
    assert torch.equal(quant_indexing(blocks, kind, ids, dtype), weight[ids])
