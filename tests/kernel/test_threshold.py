"""What the thresholds keep against `sampling.filter_probs`, and against what is known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl.engine.sampling_plan import Draws
from minisgl.kernel import sampling
from minisgl.kernel.triton.threshold import find_thresholds
from tests.draws import draws, mixed_draws, near_end

INF = float("inf")


def ends(logits: torch.Tensor, how: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = (how.temperature, how.top_k, how.top_p, how.min_p)
    vectors = [torch.from_numpy(values).to(logits.device) for values in arrays]
    return find_thresholds(logits, *vectors)


def kept(logits: torch.Tensor, how: Draws) -> torch.Tensor:
    """`[B, V]` bool."""
    threshold, tie_end = (x.unsqueeze(1) for x in ends(logits, how))
    ids, values = torch.arange(logits.shape[1], device=logits.device), logits.float()
    return (values > threshold) | ((values == threshold) & (ids < tie_end))


def expected(logits: torch.Tensor, how: Draws) -> torch.Tensor:
    """The same by the reference, and what it drops without a filter is kept."""
    arrays = (how.temperature, how.top_k, how.top_p, how.min_p)
    heat, *filters = (torch.from_numpy(values).to(logits.device) for values in arrays)
    scaled = logits.float() / heat.unsqueeze(1)
    off = (how.top_k >= logits.shape[1]) & (how.top_p >= 1) & (how.min_p <= 0)
    keeps = sampling.filter_probs(scaled, *filters) > 0
    return keeps | torch.from_numpy(off).to(logits.device).unsqueeze(1)


def check(logits: torch.Tensor, how: Draws, most: int) -> None:
    """`most` rows may be left out, for an end that rounding could move."""
    excluded = near_end(logits, how)
    assert int(excluded.sum()) <= most, "the margin hides too much"
    # What is less likely than the reference's float64 sums can tell is never drawn, kept or not.
    heat = torch.from_numpy(how.temperature).to(logits.device).unsqueeze(1)
    possible = torch.softmax(logits.float() / heat, dim=1) > 1e-12
    different = ((kept(logits, how) != expected(logits, how)) & possible).any(dim=1) & ~excluded
    wrong = different.nonzero().squeeze(1).tolist()
    assert not wrong, [(i, *(values[i] for values in how)) for i in wrong]


@pytest.mark.parametrize(
    ("vocab", "size", "dtype", "most"),
    [
        (1, 4, torch.float32, 0),
        (37, 32, torch.float32, 0),
        (300, 32, torch.float32, 1),
        (300, 16, torch.bfloat16, 2),
        (5000, 16, torch.float32, 1),
        (5000, 8, torch.float16, 1),
    ],
)
def test_the_same_is_kept_as_by_the_reference(
    device: torch.device, vocab: int, size: int, dtype: torch.dtype, most: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    spread = torch.linspace(1, 6, size).unsqueeze(1)
    logits = (torch.randn(size, vocab, generator=generator) * spread).to(device, dtype)
    check(logits, mixed_draws(size, vocab, vocab), most)


def test_of_many_equal_logits_the_lowest_ids_are_kept(device: torch.device) -> None:
    # Three values in 20,000 tokens: more lie at the end of what is kept than a list holds.
    vocab, size = 20_000, 4
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-1, 2, (size, vocab), generator=generator).float().to(device)
    logits[1:] *= -0.25  # 0 becomes -0, which is the same logit
    logits[2, ::2] *= -1  # and both are there
    how = draws(
        range(size),
        temperature=[1.0, 0.7, 1.0, 1.0],
        top_k=[6667, vocab, 9000, 12_345],
        top_p=[1.0, 0.5, 1.0, 0.9],
    )
    check(logits, how, 0)
    keeps = kept(logits, how)
    assert keeps[0].sum() == 6667 and keeps[2].sum() == 9000


def test_equal_numbers_share_the_mass_exactly(device: torch.device) -> None:
    for vocab in (16, 2049, 9000):
        logits = torch.full((4, vocab), -7.25, device=device)
        count = vocab // 2
        how = draws(
            range(4), top_k=[count, vocab, 1, vocab], top_p=[1, (count - 0.5) / vocab, 1, 1]
        )
        threshold, tie_end = ends(logits, how)
        assert threshold.tolist() == [-7.25, -7.25, -7.25, -INF]
        assert tie_end.tolist() == [count, count, 1, vocab]


def ids(device: torch.device, logits: list[float], **how: Any) -> list[int]:
    """What is kept of one row."""
    return (
        kept(torch.tensor([logits], device=device), draws([0], **how))[0].nonzero()[:, 0].tolist()
    )


def test_by_hand(device: torch.device) -> None:
    logits = [1.0, 3.0, 1.0, 2.0, 1.0, 2.0, 3.0, 1.0, -INF]
    assert ids(device, logits, top_k=3) == [1, 3, 6]
    assert ids(device, logits, top_k=6) == [0, 1, 2, 3, 5, 6]
    # The sum that top_p is a part of has no more equal ones than top_k keeps: 1 + 0.37, not 2.84.
    assert ids(device, [3.0, 2.0, 2.0, 2.0, 2.0, 2.0], top_k=2, top_p=0.7) == [0]
    # Of the first six, the two 3s have 0.605 of the sum, the two 2s 0.223 and the two 1s 0.082.
    assert ids(device, logits, top_k=6, top_p=0.7) == [1, 3, 6]
    assert ids(device, logits, top_k=6, top_p=0.93) == [0, 1, 3, 5, 6]
    # Here top_p would need the third 1, which top_k does not keep: its sum is of six.
    assert ids(device, logits, top_k=6, top_p=0.999) == [0, 1, 2, 3, 5, 6]
    assert ids(device, logits, top_k=6, top_p=0.999, min_p=0.2) == [1, 3, 5, 6]


def test_filters_at_their_ends(device: torch.device) -> None:
    logits = [1.0, 3.0, 2.0, 3.0, -INF, 0.0]
    assert ids(device, logits, top_k=1) == [1]
    assert ids(device, logits, top_p=1e-30) == [1]
    assert ids(device, logits, top_p=1e-300) == [1], "0 in float32"
    assert ids(device, logits, min_p=1.0) == [1, 3]
    assert ids(device, logits, top_k=1, min_p=1.0, top_p=1e-30) == [1]
    assert ids(device, logits, top_k=5) == [0, 1, 2, 3, 5]
    assert ids(device, logits, top_p=0.6, temperature=1e-5) == [1, 3]
    assert ids(device, [0.0, -(2.0**-24)], top_p=0.6) == [0, 1], "neighbours in float32"
    assert ids(device, [-INF] * 40 + [-3e38] + [-INF] * 40, top_p=0.5, top_k=50)[0] == 40
    assert ids(device, [-3.4e38, 3.4e38, 0.0], top_k=2) == [1, 2], "as far apart as it goes"


def test_rows_without_a_filter_or_a_distribution_keep_all(device: torch.device) -> None:
    logits = torch.randn(6, 50).to(device)
    logits[1] = -INF
    logits[2, 7] = INF
    logits[3, 9] = float("nan")
    how = draws(range(6), temperature=[0.0, 1, 1, 1, 1, 1], top_k=[5] * 5 + [50], top_p=0.5)
    how.top_p[5] = 1.0
    threshold, tie_end = ends(logits, how)
    for row in (0, 1, 2, 5):
        assert (threshold[row].item(), tie_end[row].item()) == (-INF, 50)
    assert torch.equal(kept(logits, how)[4:5], kept(logits[4:5], Draws(*(x[4:5] for x in how))))


def test_a_view_of_wider_rows(device: torch.device) -> None:
    wide = torch.randn(4, 512).to(device)
    how = mixed_draws(4, 300, 5)
    for found, same in zip(ends(wide[:, :300], how), ends(wide[:, :300].clone(), how), strict=True):
        assert torch.equal(found, same)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 9, device=device)
    how = draws(range(2), top_k=3)
    with pytest.raises(ValueError, match="float64: float32, float16 or bfloat16"):
        ends(logits.double(), how)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        ends(torch.zeros(9, 2, device=device).T, how)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        for wrong in (getattr(how, name)[:1], getattr(how, name).astype(np.int32)):
            with pytest.raises(ValueError, match=f"{name} is .* must be a contiguous \\[2\\]"):
                ends(logits, how._replace(**{name: wrong}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1, 4])
def test_large_vocabularies(device: torch.device, dtype: torch.dtype, spread: int) -> None:
    size, vocab = 256, 151_936
    generator = torch.Generator(device).manual_seed(spread)
    logits = torch.randn(size, vocab, generator=generator, device=device) * spread
    check(logits.to(dtype), mixed_draws(size, vocab, spread), size // 3)
