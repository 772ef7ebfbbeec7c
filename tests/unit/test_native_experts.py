"""The native kernels' mixtures of experts against a reference in float64, and bit for bit.

Which experts a token takes is a choice that a rounding could turn. The routers here are float32, so
that the kernels choose as the reference does, whatever the type of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernel.cpu import PackedExperts, ThreadPool, has_native, pack_weight
from minisgl.kernel.cpu.ops import native_experts
from tests.model.native_logits import distance
from tests.unit.native_weights import Kind, Sample, assert_same_bits, random_weight

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.004}
"""The rms error over the rms result: sums of some hundred products; inputs and what is between the
products rounded to 8 bits of fraction (measured: 3e-7 and 0.17 %)."""
BLOCKS_TOLERANCE = 0.03
"""Activations of 8 bits, twice one after another; measured 1.0 to 1.2 %."""


class Mixture(NamedTuple):
    """A layer's experts as the kernels have them, and the values of its weights."""

    packed: PackedExperts
    router: torch.Tensor
    experts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Gate, up and down of each, float64."""
    kind: Kind

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, hidden]` to `[T, hidden]` float64, a token after the other."""
        count, k = self.packed.router[0].n, self.packed.top_k
        logits = x.double() @ self.router.T
        probs = torch.softmax(logits[:, :count], dim=-1)
        out = torch.zeros_like(x).double()
        for t, row in enumerate(x.double()):
            ids = sorted(range(count), key=lambda e: (-float(probs[t, e]), e))[:k]
            shares = probs[t, ids]
            if self.packed.renormalize:
                shares = shares / shares.sum()
            pairs = list(zip(ids, shares, strict=True))
            if len(self.experts) > count:
                pairs.append((count, torch.sigmoid(logits[t, count])))
            for expert, share in pairs:
                gate, up, down = self.experts[expert]
                out[t] += share * (down @ (F.silu(gate @ row) * (up @ row)))
        return out

    @property
    def tolerance(self) -> float:
        return BLOCKS_TOLERANCE if isinstance(self.kind, str) else TOLERANCE[self.kind]


SIZES: dict[str, tuple[int, int, int, int, int]] = {
    # experts, of which a token takes so many; hidden and inner size; inner size of a shared one
    "two-of-four": (4, 2, 64, 32, 0),
    "odd": (17, 5, 70, 33, 0),
    "one": (1, 1, 64, 96, 0),
    "one-of-many": (33, 1, 96, 64, 0),
    "all": (5, 5, 64, 64, 0),
    "shared": (6, 2, 64, 32, 160),
    "shared-small": (3, 2, 96, 128, 32),
    "wide": (
        3,
        2,
        1111,
        33,
        0,
    ),  # more panels than work is cut into, and the last of a thread fewer
}
PLAIN = [(name, kind) for name in SIZES for kind in (torch.float32, torch.bfloat16)]
IN_BLOCKS = [
    (name, kind) for name in ("two-of-four", "shared") for kind in ("Q8_0", "Q4_0", "Q4_1")
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    assert has_native(), "these tests need a C++ compiler"
    yield ThreadPool(2)


def mixture(
    pool: ThreadPool, size: str, kind: Kind, *, renormalize: bool = True, scale: int = 1
) -> Mixture:
    """Random weights; of K-quants, `scale` makes rows that their blocks divide."""
    count, k, hidden, inner, shared = (
        n * (scale if i > 1 else 1) for i, n in enumerate(SIZES[size])
    )
    widths = [inner] * count + [shared] * (shared > 0)

    def weight(n: int, width: int, seed: int, of: Kind = kind) -> Sample:
        return random_weight(pool, of, n, width, seed)

    router = [weight(count, hidden, 1, torch.float32)]
    if shared:
        router.append(weight(1, hidden, 2, torch.float32))
    gates = [weight(width, hidden, 10 + e) for e, width in enumerate(widths)]
    ups = [weight(width, hidden, 100 + e) for e, width in enumerate(widths)]
    # Files mix types: what comes down is often kept finer.
    finer = "Q6_K" if kind == "Q4_K" else kind
    downs = [weight(hidden, width, 200 + e, finer) for e, width in enumerate(widths)]
    gate_up = [[gate.packed, up.packed] for gate, up in zip(gates, ups, strict=True)]
    values = [(g.values, u.values, d.values) for g, u, d in zip(gates, ups, downs, strict=True)]
    packed = PackedExperts(
        [part.packed for part in router], gate_up, [down.packed for down in downs], k, renormalize
    )
    return Mixture(packed, torch.cat([part.values for part in router]), values, kind)


def tokens(count: int, hidden: int, seed: int = 3) -> torch.Tensor:
    # Small enough that no expert's share is all, and SiLU's bend is met.
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)) / hidden**0.5


def hidden_of(layer: Mixture) -> int:
    return layer.packed.router[0].k


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("size", "kind"), [*PLAIN, *IN_BLOCKS], ids=str)
def test_a_mixture_is_that_of_the_reference(
    pool: ThreadPool, size: str, kind: Kind, renormalize: bool
) -> None:
    layer = mixture(pool, size, kind, renormalize=renormalize)
    x = tokens(60, hidden_of(layer))
    if kind == torch.bfloat16:
        x = x.bfloat16().float()
    expected = layer.reference(x)
    for rows in (60, 13, 1):
        found = native_experts(pool, x[:rows], layer.packed)
        assert distance(found, expected[:rows]) < layer.tolerance


def test_k_quants_of_two_types(pool: ThreadPool) -> None:
    layer = mixture(pool, "two-of-four", "Q4_K", scale=8)
    x = tokens(20, hidden_of(layer))
    assert distance(native_experts(pool, x, layer.packed), layer.reference(x)) < BLOCKS_TOLERANCE


def with_router(pool: ThreadPool, layer: Mixture, router: torch.Tensor) -> Mixture:
    packed = layer.packed._replace(router=[pack_weight(pool, router)])
    return layer._replace(packed=packed, router=router.double())


def first_is_one(x: torch.Tensor) -> torch.Tensor:
    """So that a router that looks at the first feature alone treats all tokens alike."""
    x = x.clone()
    x[:, 0] = 1
    return x


@pytest.mark.parametrize("rows", [1, 100])
def test_all_tokens_to_the_same_experts(pool: ThreadPool, rows: int) -> None:
    layer = mixture(pool, "two-of-four", torch.float32)
    router = torch.zeros(4, 64)
    router[:, 0] = torch.tensor([0.3, -2.0, 0.1, -1.0])
    layer = with_router(pool, layer, router)
    x = first_is_one(tokens(rows, 64))
    found = native_experts(pool, x, layer.packed)
    assert distance(found, layer.reference(x)) < layer.tolerance
    # Nobody reads the others: they may be anything.
    for other in (1, 3):
        for part in (*layer.packed.gate_up[other], layer.packed.down[other]):
            part.data.view(torch.float32).fill_(float("nan"))
    assert_same_bits(native_experts(pool, x, layer.packed), found, "others are NaN")


def test_of_equal_scores_the_lowest_ids(pool: ThreadPool) -> None:
    layer = with_router(pool, mixture(pool, "odd", torch.float32), torch.zeros(17, 70))
    x = tokens(9, 70)
    found = native_experts(pool, x, layer.packed)
    assert distance(found, layer.reference(x)) < layer.tolerance
    scores = torch.tensor([0.0] * 3 + [1.0] * 2 + [0.0] * 5 + [1.0] + [0.0] * 6)
    router = torch.zeros(17, 70)
    router[:, 0] = scores  # 3, 4 and 10, then 0 and 1
    layer, x = with_router(pool, layer, router), first_is_one(x)
    expected = torch.zeros(9, 70).double()
    shares = torch.softmax(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).double(), 0)
    for expert, share in zip((3, 4, 10, 0, 1), shares, strict=True):
        gate, up, down = layer.experts[expert]
        wide = x.double()
        expected += share * ((F.silu(wide @ gate.T) * (wide @ up.T)) @ down.T)
    assert distance(native_experts(pool, x, layer.packed), expected) < layer.tolerance


def test_far_apart_scores(pool: ThreadPool) -> None:
    # Shares from 1 to 0, beyond what exp can hold.
    layer = mixture(pool, "all", torch.float32)
    router = torch.zeros(5, 64)
    router[:, 0] = torch.tensor([-3e4, 200.0, 0.0, 199.0, 80.0])
    layer = with_router(pool, layer, router)
    x = first_is_one(tokens(3, 64))
    found = native_experts(pool, x, layer.packed)
    assert bool(found.isfinite().all())
    assert distance(found, layer.reference(x)) < layer.tolerance


@pytest.mark.parametrize("size", ["two-of-four", "shared", "one"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(pool: ThreadPool, size: str, value: float) -> None:
    layer = mixture(pool, size, torch.float32)
    x = tokens(14, hidden_of(layer))
    clean = native_experts(pool, x, layer.packed)
    x[[0, 6, 13], ::3] = value
    found = native_experts(pool, x, layer.packed)
    others = [i for i in range(14) if i not in (0, 6, 13)]
    assert_same_bits(found[others], clean[others], "other rows")
    assert not bool(found[[0, 6, 13]].isfinite().any())


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_score_of_nan_gives_nan(pool: ThreadPool, renormalize: bool) -> None:
    """Also of an expert that nobody takes, as a softmax over all does."""
    layer = mixture(pool, "two-of-four", torch.float32, renormalize=renormalize)
    router = torch.zeros(4, 64)
    router[:, 0] = torch.tensor([0.3, float("nan"), 0.1, -1.0])
    found = native_experts(
        pool, first_is_one(tokens(3, 64)), with_router(pool, layer, router).packed
    )
    assert bool(found.isnan().all())


# -- bit for bit ---------------------------------------------------------------------------

BITS: list[tuple[str, Kind]] = [
    ("odd", torch.float32), ("wide", torch.float32), ("shared", torch.bfloat16),
    ("shared", "Q8_0"), ("one-of-many", "Q4_1"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "kind"), BITS, ids=str)
def test_a_token_depends_on_no_other(pool: ThreadPool, size: str, kind: Kind) -> None:
    layer = mixture(pool, size, kind)
    x = tokens(150, hidden_of(layer))
    whole = native_experts(pool, x, layer.packed)
    for i in (0, 70, 149):
        assert_same_bits(native_experts(pool, x[i : i + 1], layer.packed)[0], whole[i], "alone")
    for rows in (2, 12, 13, 49, 97):
        assert_same_bits(native_experts(pool, x[:rows], layer.packed), whole[:rows], f"{rows}")
    order = torch.randperm(150, generator=torch.Generator().manual_seed(4))
    assert_same_bits(native_experts(pool, x[order], layer.packed), whole[order], "mixed up")


@pytest.mark.parametrize(("size", "kind"), BITS, ids=str)
def test_threads_do_not_matter(size: str, kind: Kind) -> None:
    pools = [ThreadPool(threads) for threads in (1, 2, 3, 8)]
    layer = mixture(pools[0], size, kind)
    for rows in (1, 7, 400):  # with eight threads tokens are cut in parts too
        x = tokens(rows, hidden_of(layer))
        first = native_experts(pools[0], x, layer.packed)
        for pool in pools[1:]:
            assert_same_bits(native_experts(pool, x, layer.packed), first, f"{pool.threads}")


def test_no_token_gives_nothing(pool: ThreadPool) -> None:
    layer = mixture(pool, "shared", torch.float32)
    assert native_experts(pool, torch.empty(0, 64), layer.packed).shape == (0, 64)


def test_what_the_kernels_cannot_take_is_refused(pool: ThreadPool) -> None:
    layer = mixture(pool, "two-of-four", torch.float32)
    x = torch.zeros(2, 64)
    for wrong in (x.double(), x[0], torch.zeros(2, 65), torch.zeros(64, 2).T):
        with pytest.raises(ValueError, match=r"must be a contiguous float32 \[T, 64\]"):
            native_experts(pool, wrong, layer.packed)
    packed, other = layer.packed, mixture(pool, "one-of-many", torch.float32).packed
    for changed, message in (
        (packed._replace(top_k=0), "takes 0 of 4 experts"),
        (packed._replace(top_k=5), "takes 5 of 4 experts"),
        (packed._replace(down=packed.down[:3]), "gates and ups of 4 experts and downs of 3"),
        (packed._replace(router=[*packed.router] * 2), r"router has \[4, 4\] outputs"),
        (packed._replace(down=other.down[:4]), "expert 0 has gate, up and down of"),
        (packed._replace(gate_up=other.gate_up[:4]), r"two of \(inner, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            native_experts(pool, x, changed)
