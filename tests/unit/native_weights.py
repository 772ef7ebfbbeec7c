"""Random weights of every type that the native kernels take, and what a product may be off by.

The reference of a product is computed in float64 from the weights' values, which for blocks are
`kernel.quant.dequantize`'s. How far the kernels may be away follows from what they round:

float32    every step of a sum: k of them, each by at most 2^-24 of what has been summed so far.
bfloat16   the same twice, since the products of a pair are added one after another; the inputs are
           rounded before, in the reference too. Denormals may become 0: 2^-126 for each product.
blocks     the activations, to 8 bits: x = scale * q + e for each 32 values of a row, where scale
           is their largest magnitude over 127 and |e| <= scale / 2, so that a sum is off by at most

               sum over k of |w[k]| * scale[block of k] / 2

           (float32's rounding of scale, of its inverse and of x times that adds 127 * 2^-22 to the
           half). Then come sums of one exact integer for each 32 or 16 weights, and of minima:
           at most three a block, plus the six roundings that a scale has behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minisgl.kernel.cpu import PackedWeight, ThreadPool, pack_weight
from minisgl.kernel.quant import BLOCKS, dequantize

Kind = torch.dtype | str

PLAIN: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
QUANTIZED = tuple(BLOCKS)
KINDS: tuple[Kind, ...] = (*PLAIN, *QUANTIZED)

EPS = 2.0**-24
# Where a block keeps its f16 scales, and of what size they make weights of about 1.
_SCALES = {
    "Q8_0": ((0,), 1 / 64),
    "Q4_0": ((0,), 1 / 4),
    "Q4_1": ((0, 2), 1 / 8),
    "Q4_K": ((0, 2), 1 / 256),
    "Q6_K": ((208,), 1 / 1024),
}
# Where the bits of a block's integers are; with all of them 0, what remains is the minimum.
_INTEGERS = {"Q4_1": slice(4, 20), "Q4_K": slice(16, 144)}


class Sample(NamedTuple):
    """A weight `[n, k]`: as the kernels have it, as they were given it, and its values."""

    kind: Kind
    packed: PackedWeight
    tensor: torch.Tensor
    values: torch.Tensor
    """float64."""
    minimum: torch.Tensor
    """float64 `[n, k]`: what a weight's value is a difference to, 0 where there is no such."""


def widths(kind: Kind) -> tuple[int, ...]:
    """Values of k to test: odd ones for plain types, one and several blocks otherwise."""
    if not isinstance(kind, str):
        return (1, 7, 70, 96)
    return (32, 96, 224) if BLOCKS[kind].values == 32 else (256, 768)


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Any integers under scales of either sign, uint8 `[n, bytes of a row]`."""
    generator = torch.Generator().manual_seed(seed)
    form = BLOCKS[kind]
    count = n * k // form.values
    blocks = torch.randint(256, (count, form.nbytes), generator=generator).to(torch.uint8)
    places, unit = _SCALES[kind]
    for place in places:
        scale = unit * (0.5 + torch.rand(count, 1, generator=generator))
        scale *= 1 - 2 * torch.randint(2, (count, 1), generator=generator)
        blocks[:, place : place + 2] = scale.half().view(torch.uint8)
    return blocks.view(n, -1)


def random_weight(pool: ThreadPool, kind: Kind, n: int, k: int, seed: int = 0) -> Sample:
    """A weight `[n, k]` with values of about 1."""
    if not isinstance(kind, str):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(n, k, generator=generator).to(kind)
        packed = pack_weight(pool, tensor)
        return Sample(kind, packed, tensor, tensor.double(), torch.zeros(n, k).double())
    blocks = random_blocks(kind, n, k, seed)
    minimum = torch.zeros(n, k)
    if kind in _INTEGERS:
        emptied = blocks.clone().view(-1, BLOCKS[kind].nbytes)
        emptied[:, _INTEGERS[kind]] = 0
        minimum = dequantize(emptied.view(n, -1), kind)
    packed = pack_weight(pool, blocks, kind)
    return Sample(kind, packed, blocks, dequantize(blocks, kind).double(), minimum.double())


def random_rows(rows: int, k: int, seed: int = 1) -> torch.Tensor:
    """Activations float32 `[rows, k]`, each row of another size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
    return torch.randn(rows, k, generator=generator) * sizes


def whole_numbers(rows: int, k: int, seed: int = 2) -> torch.Tensor:
    """Activations that 8 bits hold exactly: in each 32 integers up to 127, times a power of 2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (rows, k // 32, 32), generator=generator).float()
    # The largest somewhere in the block, with either sign.
    place = torch.randint(32, (rows, k // 32, 1), generator=generator)
    sign = 1.0 - 2.0 * torch.randint(2, place.shape, generator=generator)
    x.scatter_(2, place, 127 * sign)
    return (x * 2.0 ** torch.randint(-2, 3, place.shape, generator=generator)).view(rows, k)


def product(x: torch.Tensor, sample: Sample) -> torch.Tensor:
    """The reference, `[rows, n]` float64, of x rounded as its type says."""
    rounded = x.bfloat16() if sample.kind == torch.bfloat16 else x
    return rounded.double() @ sample.values.T


def activation_scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each value's block, `[rows, k]` float64."""
    blocks = x.double().view(x.shape[0], -1, 32)
    return (blocks.abs().amax(-1, keepdim=True) / 127).expand_as(blocks).reshape(x.shape)


def sum_bound(x: torch.Tensor, sample: Sample) -> torch.Tensor:
    """What float32 sums may be off by, `[rows, n]`, if no activation was rounded."""
    k = x.shape[1]
    if not isinstance(sample.kind, str):
        steps, least = (2 * k + 2, k * 2.0**-126) if sample.kind == torch.bfloat16 else (k + 2, 0.0)
        inputs = x.bfloat16() if sample.kind == torch.bfloat16 else x
        return steps * EPS * (inputs.double().abs() @ sample.values.abs().T) + least + k * 2.0**-149
    terms = sample.values.abs() + 2 * sample.minimum.abs()
    return (3 * k / 32 + 6) * EPS * (x.double().abs() @ terms.T)


def product_bound(x: torch.Tensor, sample: Sample) -> torch.Tensor:
    """What a product may be off by, `[rows, n]` float64."""
    if not isinstance(sample.kind, str):
        return sum_bound(x, sample)
    half = activation_scales(x) * (0.5 + 127 * 2.0**-22)
    return half @ sample.values.abs().T + sum_bound(x.abs() + half.float(), sample)


def assert_within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Every element finite and no further from the reference than its own bound."""
    assert found.shape == expected.shape == bound.shape
    assert bool(found.isfinite().all()), "not finite"
    share = (found.double() - expected).abs() / bound.clamp(min=2.0**-1000)
    worst = int(share.argmax())
    assert bool((share <= 1).all()), (
        f"element {divmod(worst, found.shape[1])}: {found.flatten()[worst]:.6g} is not "
        f"{expected.flatten()[worst]:.6g} within {bound.flatten()[worst]:.3g}; "
        f"{int((share > 1).sum())} of {share.numel()} are too far off"
    )


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal as float32 bits; a NaN equals itself."""
    assert found.dtype == expected.dtype == torch.float32
    differ = found.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    assert not bool(differ.any()), (
        f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, by up to "
        f"{(found - expected).abs().max().item():.3g}"
    )


def side_by_side(samples: Sequence[Sample], function: object, x: torch.Tensor) -> torch.Tensor:
    """What `function(x, sample)` gives for each, in the order of a merged product's outputs."""
    assert callable(function)
    return torch.cat([function(x, sample) for sample in samples], dim=1)
