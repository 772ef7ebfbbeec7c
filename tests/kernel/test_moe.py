"""Experts against `torch_ops`: choosing them, grouping pairs by them, computing them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minisgl.kernel import torch_ops
from minisgl.kernel.triton import gemm, moe
from minisgl.kernel.triton.moe import grouped_experts
from minisgl.kernel.triton.routing import group_pairs, topk_softmax

Experts = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device, dtype)


def make_experts(
    device: torch.device, dtype: torch.dtype, experts: int, hidden: int, inner: int
) -> Experts:
    """Such that gates, ups and outputs are of about 1."""
    gate_up = random(device, torch.float32, experts, 2 * inner, hidden) * hidden**-0.5
    down = random(device, torch.float32, experts, hidden, inner) * 2 * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


def route(device: torch.device, tokens: int, experts: int, top_k: int, how: str) -> torch.Tensor:
    """Ids `[T, k]`, int64: different ones of each token."""
    scores = torch.rand(tokens, experts)
    if how == "same":
        scores = scores[:1].repeat(tokens, 1)
    elif how == "few":  # the others have no token
        scores[:, top_k:-1] = -1
    elif how == "first":  # one expert has every token, the rest have some
        scores[:, 0] = 2
    return scores.topk(top_k).indices.to(device)


def check(actual: torch.Tensor, x: torch.Tensor, experts: Experts, *routing: torch.Tensor) -> None:
    """Compare with the reference in float64, within the roundings of the dtype on the way."""
    gate_up, down = (weight.double() for weight in experts)
    weights, ids = routing
    exact = torch_ops.grouped_experts(x.double(), gate_up, down, weights.double(), ids)
    # Each value goes through six roundings, of half an eps each. In float32 the sums' dominate.
    bound = max(4 * torch.finfo(x.dtype).eps, 1e-5) * exact.abs().max()
    assert actual.dtype == x.dtype and actual.shape == x.shape
    error = (actual.double() - exact).abs()
    assert error.max() <= bound, f"max {error.max()}, mean {error.mean()}, bound {bound}"


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (9, 60, 4), (5, 8, 2), (3, 4, 4), (2, 1, 1)]
)
def test_choice(
    device: torch.device, tokens: int, experts: int, top_k: int, renormalize: bool
) -> None:
    torch.manual_seed(tokens)
    logits = random(device, torch.float32, tokens, experts + 3)[:, :experts]  # any row stride
    weights, ids = topk_softmax(logits, top_k, renormalize)
    expected, expected_ids = torch_ops.topk_softmax(logits, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    # An exponential and two divisions, each of a few roundings.
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_choice_in_16_bits(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.stack([torch.randperm(256) for _ in range(6)]).to(device, dtype) / 8
    weights, ids = topk_softmax(logits, 16, True)
    expected, expected_ids = torch_ops.topk_softmax(logits, 16, True)
    assert torch.equal(ids, expected_ids) and weights.dtype == dtype
    # The last rounding may go another way.
    torch.testing.assert_close(weights, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_choice_of_equal_and_of_no_numbers(device: torch.device) -> None:
    logits = torch.zeros(5, 20, device=device)
    logits[1, [7, 13]] = 1
    logits[2] = float("-inf")
    logits[2, 9] = 0
    logits[3, 2:] = float("-inf")
    logits[4, 5] = float("nan")
    weights, ids = topk_softmax(logits, 4, True)
    assert ids[:4].tolist() == [[0, 1, 2, 3], [7, 13, 0, 1], [9, 0, 1, 2], [0, 1, 2, 3]]
    assert weights[2].tolist() == [1, 0, 0, 0] and weights[3].tolist() == [0.5, 0.5, 0, 0]
    assert weights[4].isnan().all() and len(set(ids[4].tolist())) == 4
    assert all(0 <= expert < 20 for expert in ids[4].tolist())
    assert topk_softmax(logits[:0], 4, True)[1].shape == (0, 4)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "first", "held"),
    [
        (1, 8, 2, 0, 8),
        (40, 8, 4, 0, 8),
        (40, 8, 4, 3, 2),
        (700, 3, 2, 0, 3),  # several parts
        (700, 5, 2, 1, 3),
        (3, 300, 16, 100, 200),
    ],
)
def test_groups(
    device: torch.device, tokens: int, experts: int, top_k: int, first: int, held: int
) -> None:
    ids = route(device, tokens, experts, top_k, "any")
    order, blocks = group_pairs(ids, first, held, block_m=16)
    flat = ids.flatten().tolist()
    expected = [[p for p, e in enumerate(flat) if e == first + local] for local in range(held)]
    assert order.tolist()[: sum(map(len, expected))] == sum(expected, [])
    begin, rows = 0, []
    for expert, pairs in enumerate(expected):
        end = begin + len(pairs)
        rows += [[expert, row, min(row + 16, end)] for row in range(begin, end, 16)]
        begin = end
    surplus = len(blocks) - len(rows)
    assert blocks.tolist() == rows + [[-1, 0, 0]] * surplus


@pytest.mark.parametrize("how", ["any", "same", "few", "first"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 8, 2, 64, 32), (37, 6, 3, 48, 40), (70, 4, 2, 32, 7)],
)
def test_values(
    device: torch.device, tokens: int, experts: int, top_k: int, hidden: int, inner: int, how: str
) -> None:
    torch.manual_seed(tokens)
    x = random(device, torch.float32, tokens, hidden + 8)[:, :hidden]  # any row stride
    packed = make_experts(device, torch.float32, experts, hidden, inner)
    ids = route(device, tokens, experts, top_k, how)
    weights = torch.rand(tokens, top_k).to(device)
    check(grouped_experts(x, *packed, weights, ids), x, packed, weights, ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 20, 40, 80])  # a tile each
def test_values_in_16_bits(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = random(device, dtype, tokens, 48)
    packed = make_experts(device, dtype, 3, 48, 72)
    ids = route(device, tokens, 3, 2, "first").int()
    weights = torch.rand(tokens, 2).to(device, dtype)
    check(grouped_experts(x, *packed, weights, ids), x, packed, weights, ids)


@pytest.mark.parametrize("experts", [1, 3])
def test_all_experts_of_each_token(device: torch.device, experts: int) -> None:
    x = random(device, torch.float32, 20, 32)
    packed = make_experts(device, torch.float32, experts, 32, 16)
    weights, ids = topk_softmax(random(device, torch.float32, 20, experts), experts, True)
    check(grouped_experts(x, *packed, weights, ids), x, packed, weights, ids)


def test_nothing_to_compute(device: torch.device) -> None:
    x = random(device, torch.float32, 4, 32)
    gate_up, down = make_experts(device, torch.float32, 3, 32, 16)
    weights, ids = torch.ones(4, 2, device=device), route(device, 4, 3, 2, "any")
    out = grouped_experts(x[:0], gate_up, down, weights[:0], ids[:0])
    assert out.shape == (0, 32)
    # A rank beyond the intermediate size, one beyond the experts, one with none that is chosen.
    zeros = torch.zeros_like(x)
    out = grouped_experts(x, gate_up[:, :0].contiguous(), down[..., :0].contiguous(), weights, ids)
    assert torch.equal(out, zeros)
    assert torch.equal(grouped_experts(x, gate_up[:0], down[:0], weights, ids), zeros)
    assert torch.equal(grouped_experts(x, gate_up, down, weights, ids, 3), zeros)


@pytest.mark.parametrize("tokens", [5, 90])
def test_ranges_of_experts_sum_to_the_whole(device: torch.device, tokens: int) -> None:
    x = random(device, torch.float32, tokens, 48)
    gate_up, down = make_experts(device, torch.float32, 7, 48, 40)
    ids = route(device, tokens, 7, 3, "any")
    weights = torch.rand(tokens, 3).to(device)
    total = torch.zeros_like(x)
    for begin, end in ((0, 2), (2, 3), (3, 7)):
        part = gate_up[begin:end], down[begin:end]
        out = grouped_experts(x, *part, weights, ids, begin)
        held = (ids >= begin) & (ids < end)
        check(out, x, part, weights * held, torch.where(held, ids - begin, 0))
        total += out
    torch.testing.assert_close(total, grouped_experts(x, gate_up, down, weights, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_other_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """Not on their values, NaN among them, nor on their experts, nor on a token's place."""
    x = random(device, dtype, 40, 48)
    packed = make_experts(device, dtype, 4, 48, 40)
    ids = route(device, 40, 4, 2, "any")
    weights = torch.rand(40, 2).to(device, dtype)
    whole = grouped_experts(x, *packed, weights, ids)
    back = grouped_experts(x.flip(0), *packed, weights.flip(0), ids.flip(0))
    assert torch.equal(back.flip(0), whole)
    x[5:], weights[5:], ids[5:] = float("nan"), float("nan"), ids[5:6]
    padded = grouped_experts(x, *packed, weights, ids)
    assert torch.equal(padded[:5], whole[:5])
    assert padded[5:].isnan().all()


def test_errors(device: torch.device) -> None:
    logits = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match="top_k is 9 of 8 experts"):
        topk_softmax(logits, 9, True)
    with pytest.raises(ValueError, match=r"\(2,\) torch.int64"):
        topk_softmax(torch.zeros(2, dtype=torch.int64), 1, True)
    with pytest.raises(ValueError, match="last stride of 1: strides"):
        topk_softmax(logits.T, 1, True)
    x, ids = torch.zeros(2, 32, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    gate_up, down = make_experts(device, torch.float32, 3, 32, 16)
    weights = torch.zeros(2, 1, device=device)
    with pytest.raises(ValueError, match=r"gate_up \(3, 16, 32\), down \(3, 32, 16\)"):
        grouped_experts(x, gate_up[:, :16], down, weights, ids)
    with pytest.raises(ValueError, match=r"weights \(1, 1\), ids \(2, 1\)"):
        grouped_experts(x, gate_up, down, weights[:1], ids)
    with pytest.raises(ValueError, match="torch.float16"):
        grouped_experts(x, gate_up.half(), down, weights, ids)
    with pytest.raises(ValueError, match="not torch.float32"):
        grouped_experts(x, gate_up, down, weights, weights)
    with pytest.raises(ValueError, match="be contiguous"):
        grouped_experts(x, gate_up.mT.contiguous().mT, down, weights, ids)


def test_other_ranks_experts_count_for_the_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    means, choose = [], moe._choose
    monkeypatch.setattr(moe, "_choose", lambda mean, x: means.append(mean) or choose(mean, x))
    x, ids = random(device, torch.float32, 12, 16), route(device, 12, 8, 2, "any")
    packed = make_experts(device, torch.float32, 2, 16, 16)
    weights = torch.ones(12, 2, device=device)
    grouped_experts(x, *packed, weights, ids, 4, 8)
    grouped_experts(x, *packed, weights, ids % 2)
    assert means == [3, 12]


@pytest.mark.parametrize("shared", [101_376, 167_936, 232_448])  # of an L4, an A100, an H100
def test_tiles(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pairs an expert take low tiles; bits of all tiles are the same only for one block_k."""
    monkeypatch.setattr(gemm, "shared_bytes", lambda device: shared)
    x = torch.zeros(1, 1, dtype=torch.bfloat16)
    tiles = [moe._choose(mean, x) for mean in (0.01, 8, 16, 64, 65, 1e6)]
    assert all(gemm.fits(tile, x) for tile in tiles)
    assert len({tile.block_k for tile in tiles}) == 1
    heights = [tile.block_m for tile in tiles]
    assert heights == ([16, 16, 32, 64, 128, 128] if shared > 150_000 else [16, 16, 32, 64, 64, 64])


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["any", "same", "few", "first"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 500, 3000])
def test_the_shape_of_30b_a3b(device: torch.device, tokens: int, how: str) -> None:
    torch.manual_seed(0)
    x = random(device, torch.bfloat16, tokens, 2048)
    packed = make_experts(device, torch.bfloat16, 128, 2048, 768)
    ids = route(device, tokens, 128, 8, how)
    weights = torch.rand(tokens, 8).to(device, torch.bfloat16)
    out = grouped_experts(x, *packed, weights, ids)
    check(out, x, packed, weights, ids)
    assert torch.equal(grouped_experts(x, *packed, weights, ids), out)


@pytest.mark.gpu
def test_a_graph_follows_the_routing(device: torch.device) -> None:
    """Captured with one choice of experts, replayed with others."""
    torch.manual_seed(0)
    x, logits = random(device, torch.bfloat16, 100, 256), torch.zeros(100, 16, device=device)
    logits = logits.bfloat16()
    packed = make_experts(device, torch.bfloat16, 16, 256, 128)

    def step() -> torch.Tensor:
        return grouped_experts(x, *packed, *topk_softmax(logits, 4, True))

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step()
    for scale in (0, 1, 10):
        logits.copy_(random(device, torch.bfloat16, 100, 16) * scale)
        graph.replay()
        assert torch.equal(out, step())
        check(out, x, packed, *topk_softmax(logits, 4, True))
