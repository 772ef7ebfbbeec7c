"""Tokens chosen by the Triton kernels against the reference's, alone and through the sampler.

Draws near a border (`tests/draws.py`) are counted and not compared: there are few of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from minisgl.core import Req, SamplingParams
from minisgl.engine.drawer import BatchDrawer, TorchDrawer
from minisgl.engine.sampler import Sampler
from minisgl.engine.sampling_plan import Draws, SamplingPlan
from minisgl.engine.triton_drawer import TritonDrawer
from minisgl.kernel import sampling
from minisgl.kernel.triton.sample import CHUNK, _uniform, choose_tokens
from tests.draws import draws, mixed_draws, near_border

INF = float("inf")


@triton.jit
def _uniform_kernel(seeds, positions, choices, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, _uniform(tl.load(seeds + i), tl.load(positions + i), tl.load(choices + i)))


def random_keys(size: int, seed: int) -> torch.Tensor:
    """Seeds, positions and choices `[3, size]`, each of all that it can be."""
    generator = torch.Generator().manual_seed(seed)
    bounds = (2**63 - 1, 2**40, 2**32)
    keys = [torch.randint(-bounds[0], bounds[0], (size,), generator=generator)]
    keys += [torch.randint(0, bound, (size,), generator=generator) for bound in bounds[1:]]
    return torch.stack(keys)


def test_random_numbers_are_the_same_bits(device: torch.device) -> None:
    size = 2048
    keys = random_keys(size, 1)
    keys[:, 0], keys[0, 1] = 0, -(2**63)
    out = torch.full((size,), torch.nan, dtype=torch.float64, device=device)
    _uniform_kernel[(1,)](*keys.to(device), out, SIZE=size)
    assert torch.equal(out.cpu(), sampling.philox_uniform(*keys))


def choose(logits: torch.Tensor, heat: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return choose_tokens(logits, heat, *random_keys(len(logits), seed).to(logits.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_rows_take_the_lowest_id_among_equals(
    device: torch.device, dtype: torch.dtype
) -> None:
    vocab = 2 * CHUNK + 100
    logits = torch.randn(6, vocab).clamp(max=3).to(device, dtype)
    logits[0, [vocab - 1, CHUNK, 70]] = 5
    logits[1, [vocab - 1, CHUNK]] = 5
    logits[2, [vocab - 1]] = INF
    logits[3] = -INF
    logits[4] = -7
    logits[5, : 2 * CHUNK] = -INF
    tokens = choose(logits, torch.zeros(6, device=device)).tolist()
    assert tokens[:5] == [70, CHUNK, vocab - 1, 0, 0]
    assert tokens[5] == int(logits[5].float().argmax())


@pytest.mark.parametrize("vocab", [1, 37, 300, CHUNK + 904])
def test_draws_are_those_of_the_reference(device: torch.device, vocab: int) -> None:
    size = 48
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(size, vocab, generator=generator) * torch.linspace(0, 6, size)[:, None]
    how = draws(range(size), temperature=np.linspace(0.1, 2, size).tolist(), top_k=vocab)
    uniform = sampling.philox_uniform(*random_keys(size, 2))
    near = near_border(logits, how, uniform)
    assert int(near.sum()) <= 2, "the margin hides too much"
    found = choose(logits.to(device), torch.from_numpy(how.temperature).to(device), 2).cpu()
    expected = TorchDrawer(torch.device("cpu")).draw(logits, *how, uniform)
    assert not ((found != expected) & ~near).any()


def test_equal_logits_share_the_interval_exactly(device: torch.device) -> None:
    # Sums of ones are exact: id i has [i, i + 1) / vocab.
    vocab, size = 2 * CHUNK, 24
    uniform = sampling.philox_uniform(*random_keys(size, 3))
    tokens = choose(torch.full((size, vocab), 2.5, device=device), torch.ones(size).to(device), 3)
    assert tokens.tolist() == (uniform * vocab).long().tolist()


def test_a_banned_token_is_never_drawn(device: torch.device) -> None:
    logits = torch.full((24, 2 * CHUNK + 9), -INF)
    allowed = [3, CHUNK - 1, CHUNK, CHUNK + 77, 2 * CHUNK + 8]
    logits[:, allowed] = torch.linspace(-1, 1, len(allowed))
    logits[:, CHUNK + 78] = -200.0  # 0 in float32
    tokens = choose(logits.to(device), torch.ones(24, device=device), 4)
    assert set(tokens.tolist()) == set(allowed)


def test_filtered_draws_by_hand(device: torch.device) -> None:
    # Kept: the 2 and, of the three 1s, those before id 5.
    logits = torch.tensor([[1.0, -3.0, 2.0, 1.0, 0.0, 1.0]]).expand(40, -1).to(device)
    keys = random_keys(40, 5)
    threshold = torch.ones(40, device=device)
    tie_end = torch.full((40,), 5, dtype=torch.int32, device=device)
    heat = torch.ones(40, device=device)
    tokens = choose_tokens(logits, heat, *keys.to(device), threshold, tie_end).tolist()
    edges = np.cumsum(np.exp([1.0, 2.0, 1.0]))
    uniform = sampling.philox_uniform(*keys).numpy()
    assert tokens == [(0, 2, 3)[i] for i in np.searchsorted(edges / edges[-1], uniform)]


def test_rows_without_a_distribution_disturb_nobody(device: torch.device) -> None:
    vocab = CHUNK + 700
    strange = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    strange[0, 333] = strange[1, vocab - 1] = float("nan")
    strange[2, 5] = strange[3, CHUNK + 690] = INF
    strange[4] = -INF
    strange[5] = float("nan")
    good = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits = torch.stack((strange, good), dim=1).reshape(12, vocab).to(device)
    heat = torch.tensor([1.0, 0.7]).repeat(6).to(device)
    keys = random_keys(12, 6).to(device)
    tokens = choose_tokens(logits, heat, *keys)
    assert tokens[::2].tolist() == [0] * 6
    assert torch.equal(
        tokens[1::2],
        choose_tokens(good.to(device), heat[1::2].contiguous(), *keys[:, 1::2].clone()),
    )
    greedy = choose(logits, torch.zeros(12, device=device))
    assert greedy[1::2].tolist() == good.argmax(dim=1).tolist()
    assert all(0 <= token < vocab for token in greedy.tolist())


def test_a_view_of_wider_rows_and_no_rows(device: torch.device) -> None:
    wide = torch.randn(8, 512).to(device)
    heat = torch.ones(8, device=device)
    assert torch.equal(choose(wide[:, :300], heat), choose(wide[:, :300].clone(), heat))
    assert choose(wide[:0], heat[:0]).shape == (0,)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    logits, heat = torch.zeros(2, 9, device=device), torch.ones(2, device=device)
    keys = random_keys(2, 7).to(device)
    assert choose_tokens(logits, heat, *keys).shape == (2,)
    for bad in (logits.double(), logits[0], torch.zeros(9, 2, device=device).T, logits[:, :0]):
        with pytest.raises(ValueError, match="logits"):
            choose_tokens(bad, heat, *keys)
    with pytest.raises(
        ValueError, match=r"temperature is \(1,\) torch.float32 .* contiguous \[2\]"
    ):
        choose_tokens(logits, heat[:1], *keys)
    with pytest.raises(ValueError, match="positions is .*int16"):
        choose_tokens(logits, heat, keys[0], keys[1].short(), keys[2])
    with pytest.raises(ValueError, match="seeds is .*int32"):
        choose_tokens(logits, heat, keys[0].int(), keys[1], keys[2])
    with pytest.raises(ValueError, match="go together"):
        choose_tokens(logits, heat, *keys, threshold=heat)


# -- the drawer ----------------------------------------------------------------------------


def make_plan(how: Draws, size: int, vocab: int) -> SamplingPlan:
    """Requests that draw as told, and greedy ones at the rows between."""
    params = [SamplingParams(temperature=0.0) for _ in range(size)]
    for i, row in enumerate(how.rows):
        params[row] = SamplingParams(
            temperature=float(how.temperature[i]),
            top_k=int(how.top_k[i]),
            top_p=float(how.top_p[i]),
            min_p=float(how.min_p[i]),
        )
    reqs = [
        Req(uid=i, token_ids=[1], prompt_len=1, params=p, max_len=9, seed=i * 77 - 5, choice=i % 3)
        for i, p in enumerate(params)
    ]
    return SamplingPlan.of(reqs, vocab)


def compare(
    device: torch.device, logits: torch.Tensor, how: Draws, position: int, most: int
) -> torch.Tensor:
    """Tokens of a batch, every third row of which is greedy, by both drawers."""
    size, vocab = logits.shape
    how = Draws(*(values[np.arange(size) % 3 > 0] for values in how))
    plan, positions = make_plan(how, size, vocab), np.arange(size) + position
    found = TritonDrawer(device, vocab).choose(logits, plan, positions)
    expected = BatchDrawer(TorchDrawer(device), device).choose(logits, plan, positions)
    keys = np.stack((plan.seeds, positions[how.rows], plan.choices))
    uniform = sampling.philox_uniform(*torch.from_numpy(keys).to(device))
    near = torch.zeros(size, dtype=torch.bool, device=device)
    near[torch.from_numpy(how.rows).to(device)] = near_border(logits.float(), how, uniform)
    assert int(near.sum()) <= most, "the margin hides too much"
    wrong = ((found != expected) & ~near).nonzero().squeeze(1).tolist()
    assert not wrong, [(i, plan.reqs[i].params) for i in wrong]
    return found


@pytest.mark.parametrize(
    ("vocab", "size", "most"), [(37, 36, 0), (300, 36, 1), (CHUNK + 904, 18, 1)]
)
def test_mixed_batches_are_chosen_as_by_the_reference(
    device: torch.device, vocab: int, size: int, most: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(size, vocab, generator=generator) * torch.linspace(1, 6, size)[:, None]
    compare(device, logits.to(device), mixed_draws(size, vocab, vocab + 1), 9, most)


def test_neither_other_rows_nor_what_was_kept_change_a_row(device: torch.device) -> None:
    size, vocab = 12, 500
    logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(3)).to(device)
    how = mixed_draws(size, vocab, 3)
    plan, drawer = make_plan(how, size, vocab), TritonDrawer(device, vocab)
    positions = np.arange(size) + 5
    tokens = drawer.choose(logits, plan, positions).tolist()
    assert drawer.choose(logits, plan, positions).tolist() == tokens
    later = drawer.choose(logits, plan, positions + 1).tolist()
    assert later != tokens, "the positions of the first step were kept"
    part = SamplingPlan.of(plan.reqs[4:7], vocab)
    assert drawer.choose(logits[4:7], part, positions[4:7]).tolist() == tokens[4:7]
    greedy = make_plan(draws([]), size, vocab)
    assert drawer.choose(logits, greedy, positions).tolist() == logits.argmax(dim=1).tolist()
    assert drawer.choose(logits, plan, positions).tolist() == tokens


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "logit_bias": {7: 5.0, 499: 4.0}},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": -1, "min_tokens": 9},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_sampler_chooses_as_the_reference_does(device: torch.device, mode: str) -> None:
    vocab, size, steps = 500, len(KINDS), 5
    generator = torch.Generator().manual_seed(4)
    pool = torch.randint(vocab, (size + 2, 16), generator=generator).int().to(device)
    reqs = [
        Req(
            uid=i,
            row=i,
            token_ids=pool[i, :6].tolist(),
            prompt_len=4,
            params=SamplingParams(**kind).resolve_defaults({}),
            max_len=16,
            seed=i - 3,
            choice=i % 2,
            eos_ids=frozenset({3}),
        )
        for i, kind in enumerate(KINDS)
    ]
    ours, theirs = (
        Sampler(vocab, device, pool, mode, drawer) for drawer in (TritonDrawer(device, vocab), None)
    )
    for req in reqs:
        ours.attach(req)
    distinct = set()
    for step in range(steps):
        if step == 3:  # two requests with penalties were retracted, and got other rows
            for i, row in ((3, size), (5, size + 1)):
                pool[row] = pool[i]
                reqs[i].row, reqs[i].token_ids = row, pool[i, : 6 + step].tolist()
                ours.attach(reqs[i])
        logits = torch.randn(size, vocab, generator=generator).to(device) * 3
        rows, positions = np.array([req.row for req in reqs]), np.full(size, 6 + step)
        found, expected = (s.sample(logits, reqs, rows, positions) for s in (ours, theirs))
        tokens, entries = found.read()
        assert tokens == expected.read()[0]
        ours.count(found.tokens, rows)
        for entry, same in zip(entries, expected.read()[1], strict=True):
            assert (entry is None) == (same is None)
            assert entry is None or entry.logprob == pytest.approx(same.logprob, abs=1e-5)
        pool[torch.from_numpy(rows).to(device), 6 + step] = found.tokens.int()
        distinct.update(tokens)
    assert len(distinct) > 12


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_batches(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    size, distinct = 256, set()
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(size, vocab, generator=generator, device=device) * (1 + seed / 2)
        how = mixed_draws(size, vocab, seed)
        distinct.update(compare(device, logits.to(dtype), how, seed, size // 3).tolist())
    assert len(distinct) > 1000
