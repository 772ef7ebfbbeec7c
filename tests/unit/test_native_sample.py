"""Native draws against `TorchDrawer`, the reference, and against what can be known by hand.

The two round differently: draws near a border (`tests/draws.py`) are counted and not compared, and
there are few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.engine.drawer import BatchDrawer
from minisgl.engine.sampler import Sampler
from minisgl.engine.sampling_plan import Draws
from minisgl.kernel import sampling
from minisgl.kernel.cpu import ThreadPool, has_native
from minisgl.kernel.cpu.sample import NativeDrawer
from tests.draws import MARGIN, REFERENCE, draws, mixed_draws, near_border

CPU = torch.device("cpu")
LARGE = 49152
INF = float("inf")


@pytest.fixture(scope="module")
def pools() -> Iterator[list[ThreadPool]]:
    assert has_native(), "these tests need a C++ compiler"
    yield [ThreadPool(threads) for threads in (1, 2, 3)]


@pytest.fixture(scope="module")
def pool(pools: list[ThreadPool]) -> ThreadPool:
    return pools[1]


def native(
    pool: ThreadPool, logits: torch.Tensor, how: Draws, uniform: torch.Tensor
) -> torch.Tensor:
    return NativeDrawer(pool, logits.shape[1]).draw(logits, *how, uniform)


def repeat(how: Draws, times: int) -> Draws:
    """For one row, the same draw several times."""
    return Draws(*(np.repeat(values, times) for values in how))


def kept(pool: ThreadPool, logits: list[float], **how: Any) -> list[int]:
    """The tokens that can be drawn from a row: one in the middle of each of the reference's
    intervals, which must be the reference's."""
    row, draw = torch.tensor([logits]), draws([0], **how)
    probs = REFERENCE.probs(row, *draw)[0].double()
    expected = probs.nonzero().squeeze(1)
    middle = (probs.cumsum(0) - probs / 2)[expected] / probs.sum()
    assert float(probs[expected].min() / probs.sum()) > 2 * MARGIN, "too small to be seen"
    found = native(pool, row, repeat(draw, len(expected)), middle)
    assert found.tolist() == expected.tolist()
    for uniform in (0.0, 1 - 2.0**-53):  # and the ends are the first and the last of them
        [end] = native(pool, row, draw, torch.tensor([uniform]).double()).tolist()
        assert end == expected[0 if uniform == 0 else -1]
    return expected.tolist()


# -- against the reference -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "size", "most"), [(1, 64, 0), (17, 640, 1), (300, 640, 5), (LARGE, 128, 8)]
)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_those_of_the_reference(
    pool: ThreadPool, vocab: int, size: int, most: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(1, 6, size).unsqueeze(1)
    # Filters that end anywhere, and most often where these do with a model's logits.
    logits = torch.randn(size, vocab, generator=generator) * spread
    how = mixed_draws(size, vocab, seed)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    excluded = near_border(logits, how, uniform)
    assert int(excluded.sum()) <= most, "the margin hides too much"
    found, expected = native(pool, logits, how, uniform), REFERENCE.draw(logits, *how, uniform)
    wrong = ((found != expected) & ~excluded).nonzero().squeeze(1).tolist()
    assert not wrong, [(i, *(values[i] for values in how)) for i in wrong]


GRID = st.integers(-8, 8).map(lambda i: i / 4)
"""Logits with many equal ones, others well apart, and none so unlikely that rounding hides it."""


@given(
    logits=st.lists(GRID, min_size=1, max_size=40),
    temperature=st.sampled_from([0.6, 1.0, 2.0]),
    top_k=st.integers(1, 41),
    top_p=st.sampled_from([0.11, 0.53, 0.91, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.43, 1.0]),
)
def test_filters_keep_what_those_of_the_reference_keep(
    pool: ThreadPool,
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    kept(pool, logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    choice=st.integers(0, 2**32 - 1),
)
def test_random_numbers_are_the_same_bits(
    pool: ThreadPool, seed: int, position: int, choice: int
) -> None:
    keys = np.array([[seed, 0, seed], [position, position, 1], [choice, 7, choice]])
    found = NativeDrawer(pool, 9).uniform(*keys)
    assert found.tolist() == REFERENCE.uniform(*keys).tolist()


# -- by hand -------------------------------------------------------------------------------


def test_of_equal_ones_at_the_end_the_lowest_ids_are_kept(pool: ThreadPool) -> None:
    logits = [1.0, 3.0, 1.0, 2.0, 1.0, 2.0, 3.0, 1.0, -INF]
    assert kept(pool, logits, top_k=3) == [1, 3, 6]
    assert kept(pool, logits, top_k=4) == [1, 3, 5, 6]
    assert kept(pool, logits, top_k=6) == [0, 1, 2, 3, 5, 6]
    # The sum that top_p is a part of has no more equal ones than top_k keeps: 1 + 0.37, not 2.84.
    assert kept(pool, [3.0, 2.0, 2.0, 2.0, 2.0, 2.0], top_k=2, top_p=0.7) == [0]
    # Of the first six, the two 3s have 0.605 of the sum, the two 2s 0.223 and the two 1s 0.082.
    assert kept(pool, logits, top_k=6, top_p=0.7) == [1, 3, 6]
    assert kept(pool, logits, top_k=6, top_p=0.93) == [0, 1, 3, 5, 6]
    # Here top_p would need the third 1, which top_k does not keep: its sum is of six.
    assert kept(pool, logits, top_k=6, top_p=0.999) == [0, 1, 2, 3, 5, 6]
    assert kept(pool, logits, top_k=6, top_p=0.999, min_p=0.2) == [1, 3, 5, 6]


def test_filters_at_their_ends(pool: ThreadPool) -> None:
    logits = [1.0, 3.0, 2.0, 3.0, -INF, 0.0]
    finite = [0, 1, 2, 3, 5]
    assert kept(pool, logits, top_k=1) == [1]
    assert kept(pool, logits, top_p=1e-30) == [1]
    assert kept(pool, logits, top_p=1e-300) == [1], "0 in float32"
    assert kept(pool, logits, min_p=1.0) == [1, 3]
    assert kept(pool, logits, top_k=1, min_p=1.0, top_p=1e-30) == [1]
    for off in ({}, {"top_k": 6}, {"top_k": 2**62}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert kept(pool, logits, **off) == finite
    assert kept(pool, logits, top_k=5) == finite
    assert kept(pool, logits, temperature=1e-5) == [1, 3]
    assert kept(pool, logits, temperature=2.0) == finite
    assert kept(pool, [0.0, -(2.0**-24)], top_p=0.6) == [0, 1], "neighbours in float32"
    assert kept(pool, [-INF] * 40 + [-3e38] + [-INF] * 40, top_p=0.5, top_k=50) == [40]
    assert kept(pool, [-3.4e38, 3.4e38, 0.0], top_k=2) == [1], "as far apart as float32 goes"


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 255, 256, 257, 1000, 1024, LARGE])
def test_equal_logits_share_the_interval_exactly(pool: ThreadPool, vocab: int) -> None:
    # Sums of ones are exact: id i has [i, i + 1) / vocab, for the first `count` ids that are kept.
    logits = torch.full((1, vocab), -7.25)
    for count in sorted({1, (vocab + 1) // 2, vocab}):
        ids = torch.linspace(0, count - 1, 200).long()
        low = ids.double() / count
        if count & (count - 1):  # else there is nothing to round
            low += 2.0**-52
        high = (ids + 1).double() / count - 2.0**-45
        for filters in ({"top_k": count}, {"top_p": (count - 0.5) / vocab}):
            how = repeat(draws([0], **filters), len(ids))
            assert native(pool, logits, how, low).tolist() == ids.tolist()
            assert native(pool, logits, how, high).tolist() == ids.tolist()


def test_rows_without_a_distribution_give_0_and_disturb_nobody(pool: ThreadPool) -> None:
    vocab = 700
    strange = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    strange[0, 333] = strange[1, 699] = float("nan")
    strange[2, 5] = strange[3, 690] = INF
    strange[4] = -INF
    strange[5] = float("nan")
    good = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits = torch.stack((strange, good), dim=1).reshape(12, vocab)
    uniform = torch.linspace(0.05, 0.95, 12, dtype=torch.float64)
    for filters in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}):
        how = draws(range(12), **filters)
        found = native(pool, logits, how, uniform)
        assert found[::2].tolist() == [0] * 6
        assert found.tolist() == REFERENCE.draw(logits, *how, uniform).tolist()
        assert len(set(found[1::2].tolist())) > 1


def test_a_banned_token_is_never_drawn(pool: ThreadPool) -> None:
    logits = torch.zeros(1, 600)
    banned = [0, 1, 255, 256, 300, 598, 599]
    logits[0, banned] = -INF
    uniform = torch.linspace(0, 1, 3000).double().clamp(max=1 - 2.0**-53)
    found = set(native(pool, logits, repeat(draws([0]), 3000), uniform).tolist())
    assert found == set(range(600)) - set(banned)


def test_what_no_request_can_ask_for_ends_too(pool: ThreadPool) -> None:
    logits = torch.tensor([[-INF] * 300 + [1.0, 3.0, 2.0] + [-INF] * 600])
    half = torch.tensor([0.5]).double()
    for temperature in (1e-40, 1e-30):  # the reference has infinities by then
        assert native(pool, logits, draws([0], temperature), half).tolist() == [301]
    assert native(pool, logits, draws([0], INF), half).tolist() == [301]
    for temperature in (0.0, -1.0, float("nan")):
        assert native(pool, logits, draws([0], temperature), half).tolist() == [0]
    for uniform, token in ((1.0, 302), (INF, 302), (-1.0, 300), (float("nan"), 300)):
        found = native(pool, logits, draws([0]), torch.tensor([uniform]).double())
        assert found.tolist() == [token]
    for odd in ({"top_p": -1.0}, {"min_p": 9.0}):
        assert native(pool, logits, draws([0], **odd), half).tolist() == [301]
    for odd in ({"top_p": float("nan")}, {"min_p": float("nan")}, {"top_k": -3}, {"top_k": 0}):
        found = native(pool, logits, repeat(draws([0], **odd), 9), torch.linspace(0, 1, 9).double())
        assert set(found.tolist()) == {300, 301, 302}


# -- one row alone -------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [17, 300, LARGE])
def test_neither_other_rows_nor_threads_change_a_row(pools: list[ThreadPool], vocab: int) -> None:
    size = 64
    generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
    logits = torch.randn(size, vocab, generator=generator)
    how = draws(
        rng.permutation(size).tolist(),
        temperature=rng.uniform(0.3, 2, size).tolist(),
        top_k=rng.integers(1, 2 * vocab, size).tolist(),
        top_p=rng.uniform(0.3, 1.2, size).clip(max=1).tolist(),
        min_p=rng.uniform(-0.1, 0.1, size).clip(min=0).tolist(),
    )
    # Half of the numbers are borders of the reference, where a bit of a sum decides.
    probs = REFERENCE.probs(logits, *how).double()
    border = probs[:, : vocab // 2].sum(dim=1) / probs.sum(dim=1)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    uniform[::2] = border[::2].clamp(max=1 - 2.0**-53)
    drawers = [NativeDrawer(pool, vocab) for pool in pools]
    together = drawers[0].draw(logits, *how, uniform).tolist()
    for drawer in drawers:
        for _ in range(3):  # which thread has which row, and what it had before, is chance
            assert drawer.draw(logits, *how, uniform).tolist() == together
    for i in range(size):
        one = Draws(*(values[i : i + 1] for values in how))
        assert drawers[1].draw(logits, *one, uniform[i : i + 1]).tolist() == [together[i]]


def test_a_sampler_draws_as_the_reference_does(pool: ThreadPool) -> None:
    vocab, size = 500, 24
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 1.0, "logit_bias": {7: 5.0, 499: 4.0}},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "logprobs": 2},
        {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": -1, "min_tokens": 9},
        {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(vocab, (size, 16), generator=generator).int()
    reqs = [
        Req(
            uid=i,
            row=i,
            token_ids=tokens[i, :6].tolist(),
            prompt_len=4,
            params=SamplingParams(**kinds[i % len(kinds)]).resolve_defaults({}),
            max_len=16,
            seed=i - 3,
            choice=i % 2,
            eos_ids=frozenset({3}),
        )
        for i in range(size)
    ]
    rows = np.arange(size)
    drawer = BatchDrawer(NativeDrawer(pool, vocab), CPU)
    ours, theirs = (Sampler(vocab, CPU, tokens, "raw", choice) for choice in (drawer, None))
    distinct = set()
    for step in range(6):
        logits = torch.randn(size, vocab, generator=generator) * 3
        # Some steps have the same requests as the one before, the fourth others.
        part = slice(None, None, 2 if step == 3 else 1)
        args = logits[part], reqs[part], rows[part], np.full(size, 6 + step)[part]
        found, expected = ours.sample(*args).read(), theirs.sample(*args).read()
        assert found == expected
        distinct.update(found[0])
    assert len(distinct) > 20


# -- what it does not take -----------------------------------------------------------------


def test_wrong_shapes_and_types_are_refused(pool: ThreadPool) -> None:
    logits, how, uniform = torch.zeros(4, 9), draws([0, 3]), torch.zeros(2, dtype=torch.float64)
    drawer = NativeDrawer(pool, 9)
    assert drawer.draw(logits, *how, uniform).tolist() == [0, 0]
    for bad in (logits[:, :8], logits.double(), logits[0], torch.zeros(9, 4).T):
        with pytest.raises(ValueError, match="logits"):
            drawer.draw(bad, *how, uniform)
    for rows in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match="there are 4 of logits"):
            drawer.draw(logits, *draws(rows), uniform)
    for name in how._fields[1:]:
        values = getattr(how, name)
        for wrong in (values[:1], values.astype(np.float64), np.repeat(values, 2)[::2]):
            with pytest.raises(ValueError, match=name):
                drawer.draw(logits, *how._replace(**{name: wrong}), uniform)
    with pytest.raises(ValueError, match="uniform"):
        drawer.draw(logits, *how, uniform.float())


def test_the_margin_is_one() -> None:
    # `near_border` sees a number at a border, an end of top_p and an end of min_p.
    logits = torch.tensor([[0.0, 0.0]])
    middle, away = torch.tensor([[0.5], [0.4]], dtype=torch.float64)
    assert near_border(logits, draws([0]), middle).tolist() == [True]
    assert near_border(logits, draws([0]), away).tolist() == [False]
    assert near_border(logits, draws([0], top_p=0.5), away).tolist() == [True]
    assert near_border(logits, draws([0], min_p=1.0), away).tolist() == [True]
    assert sampling.sample_from_probs(torch.tensor([[0.5, 0.5]]), away).tolist() == [0]
