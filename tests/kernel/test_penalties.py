"""Penalties from counts that stay on the device against those that count anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core import Req, SamplingParams
from minisgl.engine.penalties import PoolPenalties
from minisgl.engine.sampling_plan import SamplingPlan
from minisgl.engine.triton_drawer import CountedPenalties
from minisgl.kernel import sampling
from minisgl.kernel.triton.penalties import (
    add_tokens,
    apply_penalties,
    count_tokens,
    new_counts,
)


def parts(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each id is in the prompt, and how often in the output."""
    return counts < 0, counts.int() & 0x7FFF


def random_pool(rows: int, length: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (rows, length), generator=generator).int()


def test_a_row_is_counted_anew_and_the_others_are_left(device: torch.device) -> None:
    vocab = 40
    pool = random_pool(3, 60, vocab, 1).to(device)
    counts = new_counts(3, vocab, device)
    for prompt_len, total_len in ((20, 60), (7, 7), (1, 50)):
        count_tokens(counts, pool, 1, prompt_len, total_len)
        in_prompt, used = parts(counts)
        row = pool[1].tolist()
        assert in_prompt[1].nonzero().squeeze(1).tolist() == sorted(set(row[:prompt_len]))
        assert used[1].tolist() == [row[prompt_len:total_len].count(i) for i in range(vocab)]
        assert not counts[[0, 2]].any()


def test_counts_end_at_what_they_hold(device: torch.device) -> None:
    pool = torch.full((1, 40_000), 2, dtype=torch.int32, device=device)
    counts = new_counts(1, 4, device)
    count_tokens(counts, pool, 0, 1, 40_000)
    assert parts(counts)[0].tolist() == [[False, False, True, False]]
    assert parts(counts)[1].tolist() == [[0, 0, 0x7FFF, 0]]
    index = torch.zeros(1, dtype=torch.int64, device=device)
    add_tokens(counts, index, index + 2, index)
    assert counts.tolist() == [[0, 0, -1, 0]]


def test_tokens_are_added_to_their_rows(device: torch.device) -> None:
    vocab, size = 50, 150
    pool = random_pool(size + 3, 9, vocab, 2).to(device)
    counts = new_counts(size + 3, vocab, device)
    for row in range(size + 3):
        count_tokens(counts, pool, row, 4, 9)
    expected = counts.clone()
    rows, places = torch.randperm(size + 3)[:size].to(device), torch.randperm(size).to(device)
    tokens = torch.randint(vocab, (size,)).to(device)
    expected[rows, tokens[places]] += 1
    add_tokens(counts, rows, tokens, places)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("vocab", [37, 5000])
def test_logits_are_those_of_the_reference(device: torch.device, vocab: int) -> None:
    size, rows = 5, torch.tensor([6, 0, 3])
    pool = random_pool(7, 300, min(vocab, 400), vocab).to(device)
    counts = new_counts(7, vocab, device)
    lengths = {6: (100, 300), 0: (1, 2), 3: (200, 200)}
    for row, bounds in lengths.items():
        count_tokens(counts, pool, row, *bounds)
    penalties = torch.tensor([[1.7, 0.5, -0.25], [1.0, -2.0, 2.0], [1e-38, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(size, vocab + 11, generator=generator).to(device) * 5
    logits = wide[:, :vocab]
    logits[4, 5] = -torch.inf
    places = torch.tensor([1, 3, 4])
    expected = logits.clone()
    for place, row, values in zip(places, rows.tolist(), penalties, strict=True):
        prompt_len, total_len = lengths[row]
        tokens = pool[row : row + 1].long()
        expected[place] = sampling.apply_penalties(
            logits[place : place + 1],
            sampling.token_counts(tokens[:, :prompt_len], vocab),
            sampling.token_counts(tokens[:, prompt_len:total_len], vocab),
            values.unsqueeze(0).to(device),
        )[0]
    beside = wide[:, vocab:].clone()
    apply_penalties(
        logits, places.to(device), counts, rows.to(device), penalties.to(device).contiguous()
    )
    # A product and a difference may be rounded once or twice: 2^-23 of what they are made of.
    torch.testing.assert_close(logits, expected, rtol=2**-22, atol=1e-5)
    assert torch.equal(logits[[0, 2]], expected[[0, 2]]), "rows that nobody named"
    assert torch.equal(wide[:, vocab:], beside)
    assert logits[4].abs().max() <= 1e30


def test_steps_count_as_the_reference_does(device: torch.device) -> None:
    vocab, size = 60, 4
    pool = random_pool(6, 40, vocab, 4).to(device)
    kinds = [{"presence_penalty": 1.0}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4}]
    reqs = [
        Req(
            uid=i,
            row=i,
            token_ids=pool[i, :10].tolist(),
            prompt_len=8,
            params=SamplingParams(temperature=0.0, **kind),
            max_len=40,
        )
        for i, kind in enumerate(kinds)
    ]
    ours, theirs = CountedPenalties(pool, vocab), PoolPenalties(pool)
    ours.attach(reqs[1])
    assert ours._counts is None, "nobody has penalties yet"
    for req in reqs:
        ours.attach(req)
    plan = SamplingPlan.of(reqs, vocab)
    for step in range(6):
        if step == 4:  # the last one was retracted; its row is another's, and it has a free one
            pool[5], reqs[3].row = pool[3], 5
            reqs[3].token_ids = pool[5, : 10 + step].tolist()
            ours.attach(reqs[3])
            pool[3] = 7
        rows, positions = np.array([req.row for req in reqs]), np.full(size, 10 + step)
        found = torch.randn(size, vocab).to(device)
        expected = found.clone()
        ours.apply(found, plan, rows, positions)
        theirs.apply(expected, plan, rows, positions)
        torch.testing.assert_close(found, expected, rtol=2**-22, atol=1e-6)
        tokens = torch.randint(vocab, (size,)).to(device)
        ours.add(tokens, plan, rows)
        pool[torch.from_numpy(rows).to(device), 10 + step] = tokens.int()


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    logits, counts = torch.zeros(2, 9, device=device), new_counts(3, 9, device)
    index, penalties = torch.tensor([1]).to(device), torch.ones(1, 3, device=device)
    apply_penalties(logits, index, counts, index, penalties)
    with pytest.raises(ValueError, match="must be float32"):
        apply_penalties(logits.half(), index, counts, index, penalties)
    with pytest.raises(ValueError, match=r"must be \[rows, 9\] int16"):
        apply_penalties(logits, index, counts.int(), index, penalties)
    with pytest.raises(ValueError, match=r"must be \[rows, 8\] int16"):
        apply_penalties(logits[:, :8], index, counts, index, penalties)
    with pytest.raises(ValueError, match="rows is"):
        apply_penalties(logits, index, counts, index.int(), penalties)
    with pytest.raises(ValueError, match=r"must be \[1, 3\] float32"):
        apply_penalties(logits, index, counts, index, penalties[:, :2])
    with pytest.raises(ValueError, match="tokens is"):
        add_tokens(counts, index, index.int(), index)


@pytest.mark.gpu
def test_large_vocabulary(device: torch.device) -> None:
    size, vocab = 256, 151_936
    pool = random_pool(size, 2000, vocab, 5).to(device)
    counts = new_counts(size, vocab, device)
    for row in range(size):
        count_tokens(counts, pool, row, 1000, 2000)
    every = torch.arange(size, device=device)
    penalties = torch.tensor([[1.1, 0.5, 0.25]], device=device).expand(size, 3).contiguous()
    logits = torch.randn(size, vocab, device=device)
    tokens = pool.long()
    expected = sampling.apply_penalties(
        logits,
        sampling.token_counts(tokens[:, :1000], vocab),
        sampling.token_counts(tokens[:, 1000:], vocab),
        penalties,
    )
    apply_penalties(logits, every, counts, every, penalties)
    torch.testing.assert_close(logits, expected, rtol=2**-22, atol=1e-6)
