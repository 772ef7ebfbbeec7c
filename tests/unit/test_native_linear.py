"""The native kernels' products and lookups against references, on odd shapes of every type.

`native_weights.py` derives the bounds. Everything here also runs on libraries built for other
instruction sets and with sanitizers: see `test_native_builds.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minisgl.kernel.cpu import ThreadPool, has_native, pack_weight
from minisgl.kernel.cpu.ops import native_linear, native_lookup
from minisgl.kernel.quant import dequantize
from tests.unit.native_weights import (
    KINDS,
    QUANTIZED,
    Kind,
    assert_same_bits,
    assert_within,
    product,
    product_bound,
    random_blocks,
    random_rows,
    random_weight,
    side_by_side,
    sum_bound,
    whole_numbers,
    widths,
)

ROWS = 40
"""Of a tile 1 to 12, and up to four tiles."""
OUTPUTS = (1, 31, 33, 100)
"""Panels have 32: less than one, one with a part missing, and several."""
SHAPES = [(kind, n, k) for kind in KINDS for n in OUTPUTS for k in widths(kind)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    assert has_native(), "these tests need a C++ compiler"
    yield ThreadPool(2)


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES, ids=str)
def test_products_are_those_of_the_reference(pool: ThreadPool, kind: Kind, n: int, k: int) -> None:
    sample, x = random_weight(pool, kind, n, k), random_rows(ROWS, k)
    whole = native_linear(pool, x, [sample.packed])
    assert_within(whole, product(x, sample), product_bound(x, sample))
    for rows in range(1, ROWS):  # every height of a tile, and every way of cutting rows into them
        found = native_linear(pool, x[:rows], [sample.packed])
        assert_same_bits(found, whole[:rows], f"{rows} rows of {ROWS}")


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("n", [33, 100])
def test_activations_of_8_bits_are_multiplied_exactly(pool: ThreadPool, kind: str, n: int) -> None:
    # Nothing is rounded but float32 sums: a wrong scale or two elements exchanged would show.
    k = widths(kind)[-1]
    sample, x = random_weight(pool, kind, n, k, seed=3), whole_numbers(13, k)
    expected, bound = product(x, sample), sum_bound(x, sample)
    assert_within(native_linear(pool, x, [sample.packed]), expected, bound)
    swapped = x.clone()
    swapped[:, [5, 6]] = x[:, [6, 5]]
    changed = (product(swapped, sample) - expected).abs() > 4 * bound
    assert float(changed.float().mean()) > 0.5, "the bound would hide a mistake"


@pytest.mark.parametrize("kind", QUANTIZED)
def test_one_activation_meets_its_own_weight(pool: ThreadPool, kind: str) -> None:
    # Row i has a single 1, at i: the product is the weights themselves, each k at its place.
    k = widths(kind)[0]
    sample = random_weight(pool, kind, 35, k, seed=4)
    found = native_linear(pool, torch.eye(k), [sample.packed])
    scale = 127 * torch.tensor(1 / 127)  # how close float32 comes to 1
    assert abs(float(scale) - 1) < 1e-6
    error = (found.double() - sample.values.T).abs()
    bound = 1e-6 * (sample.values.abs() + 2 * sample.minimum.abs()).T
    assert bool((error <= bound).all())


MIXES: list[tuple[Kind, ...]] = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q4_1", "Q8_0", torch.float32),
    (torch.bfloat16, "Q4_0"),
    (torch.bfloat16, torch.float32, "Q8_0"),
    (torch.float32, torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("kinds", MIXES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 31, 33), (64, 32, 5)], ids=str)
def test_parts_of_several_types_and_their_bias(
    pool: ThreadPool, kinds: tuple[Kind, ...], sizes: tuple[int, ...]
) -> None:
    k = 256
    samples = [
        random_weight(pool, kind, n, k, seed=i)
        for i, (kind, n) in enumerate(zip(kinds, sizes, strict=False))
    ]
    packed, x = [sample.packed for sample in samples], random_rows(14, k)
    bias = torch.randn(sum(w.n for w in packed), generator=torch.Generator().manual_seed(5))
    found = native_linear(pool, x, packed, bias)
    expected = side_by_side(samples, product, x) + bias.double()
    bound = side_by_side(samples, product_bound, x) + 2.0**-23 * expected.abs()
    assert_within(found, expected, bound)
    # Each part is what it is alone, and a bias is added to the finished sum.
    alone = torch.cat([native_linear(pool, x, [part]) for part in packed], dim=1)
    assert_same_bits(native_linear(pool, x, packed), alone, "parts")
    assert_same_bits(found, alone + bias, "bias")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", OUTPUTS)
def test_a_lookup_gives_the_rows_exactly(pool: ThreadPool, kind: Kind, n: int) -> None:
    for k in widths(kind):
        sample = random_weight(pool, kind, n, k, seed=6)
        rows = (
            sample.tensor.float() if not isinstance(kind, str) else dequantize(sample.tensor, kind)
        )
        ids = torch.randint(n, (2 * n,), generator=torch.Generator().manual_seed(7))
        assert_same_bits(native_lookup(sample.packed, ids), rows[ids], f"k = {k}")
        assert native_lookup(sample.packed, ids[:0]).shape == (0, k)


# -- extremes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zeros_give_zero(pool: ThreadPool, kind: Kind) -> None:
    k = widths(kind)[-1]
    sample = random_weight(pool, kind, 33, k)
    found = native_linear(pool, torch.zeros(5, k), [sample.packed])
    assert_same_bits(found.abs(), torch.zeros(5, 33), "zeros")
    x = random_rows(5, k)
    x[:, ::2] = 0  # and a block of nothing but zeros beside others
    x[:, : k // 3] = 0
    found = native_linear(pool, x, [sample.packed])
    assert_within(found, product(x, sample), product_bound(x, sample))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-20, 1e-30])
def test_large_and_small_activations(pool: ThreadPool, kind: Kind, size: float) -> None:
    k = widths(kind)[-1]
    sample, x = random_weight(pool, kind, 33, k), random_rows(7, k) * size
    found = native_linear(pool, x, [sample.packed])
    assert_within(found, product(x, sample), product_bound(x, sample))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1e-37, 1e-40, 1e-44])
def test_activations_about_the_least_normal_one(pool: ThreadPool, kind: Kind, size: float) -> None:
    # 127 over the largest magnitude may overflow, so blocks may take such values for 0.
    k = widths(kind)[-1]
    sample, x = random_weight(pool, kind, 33, k), random_rows(7, k).sign() * size
    found = native_linear(pool, x, [sample.packed])
    bound = product_bound(x, sample) + (
        x.double().abs() @ sample.values.abs().T if isinstance(kind, str) else 0
    )
    assert_within(found, product(x, sample), bound)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite_stays_in_its_row(pool: ThreadPool, kind: Kind, value: float) -> None:
    k = widths(kind)[-1]
    sample, x = random_weight(pool, kind, 33, k), random_rows(14, k)
    clean = native_linear(pool, x, [sample.packed])
    spoiled = x.clone()
    spoiled[[0, 6, 13], ::3] = value
    found = native_linear(pool, spoiled, [sample.packed])
    others = [i for i in range(14) if i not in (0, 6, 13)]
    assert_same_bits(found[others], clean[others], "other rows")
    assert not torch.equal(found[[0, 6, 13]], clean[[0, 6, 13]])


# -- bit for bit ---------------------------------------------------------------------------

BATCHES = (1, 2, 7, 12, 13, 32, 64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(pool: ThreadPool, kind: Kind) -> None:
    k, row = widths(kind)[-1], random_rows(1, widths(kind)[-1], seed=8)
    sample = random_weight(pool, kind, 100, k)
    alone = native_linear(pool, row, [sample.packed])
    for batch in BATCHES:
        for seed, size in ((9, 1.0), (10, 1e20), (11, 0.0)):
            for place in {0, batch // 2, batch - 1}:
                x = random_rows(batch, k, seed) * size
                x[place] = row
                found = native_linear(pool, x, [sample.packed])
                assert_same_bits(found[place : place + 1], alone, f"row {place} of {batch}")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threads_do_not_matter(kind: Kind) -> None:
    k = widths(kind)[-1]
    pools = {threads: ThreadPool(threads) for threads in (1, 2, 3)}
    samples = [random_weight(pool, kind, 100, k) for pool in pools.values()]
    for sample in samples:  # packing is shared out too
        assert torch.equal(sample.packed.data, samples[0].packed.data)
    bias = torch.randn(200, generator=torch.Generator().manual_seed(12))
    for rows in BATCHES:
        x = random_rows(rows, k)
        first = native_linear(pools[1], x, [samples[0].packed] * 2, bias)
        for threads in (2, 3, 2, 3):
            found = native_linear(pools[threads], x, [samples[0].packed] * 2, bias)
            assert_same_bits(found, first, f"{threads} threads, {rows} rows")


# -- borders -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_weights_may_lie_inside_a_larger_tensor(pool: ThreadPool, kind: Kind) -> None:
    k = widths(kind)[-1]
    tensor = random_weight(pool, kind, 40, k).tensor
    name = kind if isinstance(kind, str) else None
    expected = pack_weight(pool, tensor, name).data
    wider = torch.cat((tensor, tensor[:, :3]), dim=1)
    assert torch.equal(pack_weight(pool, wider[:, : tensor.shape[1]], name).data, expected)
    columns = tensor.T.contiguous().T  # neighbours of a column lie together
    assert torch.equal(pack_weight(pool, columns, name).data, expected)
    below = pack_weight(pool, torch.cat((tensor, tensor))[40:], name).data
    assert torch.equal(below, expected)


def test_what_the_kernels_cannot_take_is_refused(pool: ThreadPool) -> None:
    weight = random_weight(pool, torch.float32, 8, 32).packed
    other = random_weight(pool, torch.float32, 8, 64).packed
    x = torch.zeros(2, 32)
    for wrong in (x.bfloat16(), x[0], torch.zeros(2, 33), torch.zeros(32, 2).T):
        with pytest.raises(ValueError, match=r"must be a contiguous float32 \[T, 32\]"):
            native_linear(pool, wrong, [weight])
    for weights in ([], [weight] * 4, [weight, other]):
        with pytest.raises(ValueError, match="1 to 3 weights of the same k"):
            native_linear(pool, x, weights)
    for bias in (torch.zeros(7), torch.zeros(8).double()):
        with pytest.raises(ValueError, match="bias is"):
            native_linear(pool, x, [weight], bias)
    for ids in (torch.tensor([8]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="there are 8 rows"):
            native_lookup(weight, ids)
    with pytest.raises(ValueError, match="must be int64"):
        native_lookup(weight, torch.tensor([1], dtype=torch.int32))
    for tensor, kind in ((torch.zeros(2, 2).half(), None), (random_blocks("Q8_0", 2, 32), "Q5_0")):
        with pytest.raises(ValueError, match="The native kernels can't take"):
            pack_weight(pool, tensor, kind)
