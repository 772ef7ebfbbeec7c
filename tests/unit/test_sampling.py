"""The sampling ops against brute-force definitions, and the sampler's rows' independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams
from minisgl.engine.sampler import Sampled, Sampler
from minisgl.kernel import sampling

V = 50
CPU = torch.device("cpu")


def test_philox_matches_the_published_vectors():
    """Known-answer tests of Random123's philox4x32-10."""
    cases = [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        words = sampling.philox4x32(
            tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
        )
        assert tuple(w.item() for w in words) == expected


def test_uniform_numbers_are_uniform_and_differ_by_each_part_of_the_key():
    n = 20000
    zeros, counts = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    for u in (
        sampling.philox_uniform(zeros, counts, zeros),
        sampling.philox_uniform(counts, zeros, zeros),
        sampling.philox_uniform(zeros, zeros, counts),
        sampling.philox_uniform(-counts, zeros, zeros),
    ):
        assert u.min() >= 0 and u.max() < 1
        assert len(u.unique()) == n
        # The largest gap to the uniform distribution; 1.95 / sqrt(n) is exceeded once in 1,000.
        gap = (u.sort().values - (counts + 0.5) / n).abs().max()
        assert gap < 1.95 / math.sqrt(n)


def brute_filter(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What survives, by the definitions, in exact sequence on one row."""
    probs = np.exp(np.array(logits, dtype=np.float64) - max(logits))
    probs /= probs.sum()
    order = sorted(range(len(logits)), key=lambda i: (-probs[i], i))[:top_k]
    kept_mass = sum(probs[i] for i in order)
    kept, total = [], 0.0
    for i in order:
        if kept and total >= top_p * kept_mass:
            break
        kept.append(i)
        total += probs[i]
    return {i for i in kept if probs[i] >= min_p * probs[order[0]]}


# Logits on a coarse grid: ties are frequent, near-ties (where float32 could differ) are not.
grid = st.integers(-40, 40).map(lambda i: i / 4)


@given(
    st.lists(st.lists(grid, min_size=8, max_size=8), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([0.11, 0.53, 0.91, 1.0]),
    st.sampled_from([0.0, 0.07, 0.43]),
)
def test_filters_keep_what_the_definitions_keep(rows, top_k, top_p, min_p):
    logits, size = torch.tensor(rows), len(rows)
    probs = sampling.filter_probs(
        logits,
        torch.full((size,), top_k),
        torch.full((size,), top_p),
        torch.full((size,), min_p),
    )
    full = torch.softmax(logits, dim=-1)
    for i, row in enumerate(rows):
        kept = {j for j in range(8) if probs[i, j] > 0}
        assert kept == brute_filter(row, top_k, top_p, min_p)
        assert all(probs[i, j] == full[i, j] for j in kept)


def test_sampling_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.0, 0.2, 0.0, 0.6, 0.2, 0.0]]).expand(6, -1) * 3  # any sum
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert sampling.sample_from_probs(probs, uniform).tolist() == [1, 1, 3, 3, 4, 4]


def test_argmax_takes_the_lowest_id_among_equals():
    logits = torch.zeros(3, V)
    logits[1, 7] = logits[1, 9] = 1.0
    assert sampling.argmax(logits).tolist() == [0, 7, 0]


@given(st.lists(st.lists(st.integers(0, 3), min_size=256, max_size=256), min_size=1, max_size=3))
def test_argmax_in_pieces_takes_the_first_of_many_equals(rows):
    logits = torch.tensor(rows, dtype=torch.float32)
    assert sampling.argmax(logits).tolist() == [row.index(max(row)) for row in rows]


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    prompt = sampling.token_counts(torch.tensor([[0, 1, -1]]), 4)
    output = sampling.token_counts(torch.tensor([[2, 2, 1]]), 4)
    assert output.tolist() == [[0, 1, 2, 0]]
    result = sampling.apply_penalties(logits, prompt, output, torch.tensor([[2.0, 0.5, 0.25]]))
    # repetition 2 on ids 0, 1, 2; presence 0.5 on 1, 2; frequency 0.25 times the output's count
    assert result.tolist() == [[1.0, -4.0 - 0.5 - 0.25, 0.5 - 0.5 - 0.5, 0.0]]


def make_sampler(pool: torch.Tensor, mode: str = "raw") -> Sampler:
    return Sampler(V, CPU, pool, mode)


def make_req(uid: int, pool: torch.Tensor, ids: list[int], prompt: int, **params) -> Req:
    pool[uid, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    complete = SamplingParams(**params).resolve_defaults({})
    return Req(
        uid=uid,
        row=uid,
        token_ids=ids,
        prompt_len=prompt,
        params=complete,
        max_len=99,
        seed=params.get("seed", 0),
        eos_ids=frozenset({3}),
    )


def sample(sampler: Sampler, logits: torch.Tensor, reqs: list[Req]) -> Sampled:
    """The next token of requests whose tokens are all known."""
    rows = np.array([req.row for req in reqs])
    return sampler.sample(logits, reqs, rows, np.array([len(req.token_ids) for req in reqs]))


KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.5, "seed": 3, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.0, "seed": 4, "logit_bias": {7: 50.0}, "logprobs": 0},
    {"temperature": 1e-4, "seed": 5},
    {"temperature": 0.0, "min_tokens": 9},
]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_rows_of_a_mixed_batch_do_not_influence_each_other(mode):
    torch.manual_seed(0)
    pool = torch.zeros(len(KINDS), 32, dtype=torch.int32)
    reqs = [
        make_req(i, pool, torch.randint(0, V, (4 + i,)).tolist(), 3, **kind)
        for i, kind in enumerate(KINDS)
    ]
    logits = torch.randn(len(KINDS), V) * 3
    sampler = make_sampler(pool, mode)
    before = logits.clone()
    together = sample(sampler, logits, reqs)
    assert torch.equal(logits, before), "the model's logits were overwritten"
    tokens, entries = together.read()
    assert tokens == together.tokens.tolist()
    for i, req in enumerate(reqs):
        alone = sample(sampler, logits[i : i + 1], [req])
        assert alone.read() == ([tokens[i]], [entries[i]]), KINDS[i]
    reverse = sample(sampler, logits.flip(0), reqs[::-1])
    assert reverse.read() == (tokens[::-1], entries[::-1])


def test_penalties_see_the_pool_up_to_the_position_that_is_sampled():
    # The host does not know the outputs yet: 4 was sampled before, and 9 for the longer one only;
    # in the shorter one's row it is what an earlier owner left.
    pool = torch.tensor([[1, 2, 4, 9, 9, 9]] * 2, dtype=torch.int32)
    logits = torch.zeros(2, V)
    logits[:, [4, 9, 2]] = torch.tensor([6.0, 5.5, 5.0])
    reqs = [make_req(i, pool, [1, 2], 2, temperature=0.0, presence_penalty=2.0) for i in range(2)]
    sampled = make_sampler(pool).sample(logits, reqs, np.array([0, 1]), np.array([3, 4]))
    assert sampled.read() == ([9, 2], [None, None])


def test_min_tokens_bans_every_end_and_bias_moves_the_choice():
    pool = torch.zeros(2, 8, dtype=torch.int32)
    logits = torch.zeros(2, V)
    logits[:, 3], logits[:, 4], logits[:, 5] = 9.0, 8.0, 7.0  # 3 is EOS
    banned = make_req(0, pool, [1], 1, temperature=0.0, min_tokens=1, stop_token_ids=[4])
    free = make_req(1, pool, [1], 1, temperature=0.0, logit_bias={5: 3.0})
    assert sample(make_sampler(pool), logits, [banned, free]).tokens.tolist() == [5, 5]


def test_logprobs_are_raw_unless_processed_is_asked_for():
    pool = torch.zeros(1, 8, dtype=torch.int32)
    logits = torch.arange(V).float().unsqueeze(0) / 10
    req = make_req(0, pool, [1], 1, temperature=0.5, top_k=2, seed=1, logprobs=2)
    [raw] = sample(make_sampler(pool), logits, [req]).read()[1]
    expected = torch.log_softmax(logits[0], -1)
    assert raw is not None
    assert raw.logprob == pytest.approx(expected[raw.token_id].item(), abs=1e-6)
    assert [token for token, _ in raw.top] == [V - 1, V - 2]
    assert raw.rank == V - raw.token_id
    [processed] = sample(make_sampler(pool, "processed"), logits, [req]).read()[1]
    assert processed is not None
    # top_k = 2 leaves two tokens whose scaled logits differ by 0.2
    assert processed.top[0][1] == pytest.approx(-math.log(1 + math.exp(-0.2)), abs=1e-6)


def test_samples_follow_the_distribution():
    pool = torch.zeros(1, 8, dtype=torch.int32)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2] + [1e-30] * (V - 3))).unsqueeze(0)
    n = 3000
    counts = np.zeros(V)
    for seed in range(n):
        req = make_req(0, pool, [1], 1, temperature=1.0, seed=seed)
        counts[sample(make_sampler(pool), logits, [req]).tokens.item()] += 1
    # Four standard deviations of a binomial share are at most 0.037 here.
    assert np.abs(counts[:3] / n - [0.5, 0.3, 0.2]).max() < 0.037
