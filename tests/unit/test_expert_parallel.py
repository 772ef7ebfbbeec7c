"""Expert parallelism in ops and layers: what the ranks compute sums to the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl.kernel.torch_ops import grouped_experts
from minisgl.layers import MoELayer
from minisgl.utils import partition
from tests.helpers import assert_close
from tests.unit.checkpoints import load_into_model
from tests.unit.test_loader_slices import make

pytestmark = pytest.mark.usefixtures("clean_state")

TOKENS, EXPERTS, HIDDEN, INNER = 9, 5, 8, 6
SIZES = (2, 3, 4)  # the last of four has no expert
ROUTINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "spread": lambda logits: logits,
    "one": lambda logits: logits + torch.tensor([0, 0, 0, 60.0, 30.0]),  # then the next one
}
Parts = list[torch.Tensor]


@pytest.fixture
def each_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    """`each_rank(size, run)`: what each rank hands to the all-reduce in `run()`."""

    handed: Parts = []

    def all_reduce(_self: object, part: torch.Tensor) -> torch.Tensor:
        handed.append(part)
        return part

    monkeypatch.setattr("minisgl.distributed.DistributedCommunicator.all_reduce", all_reduce)

    def run_all(size: int, run: Callable[[], Any]) -> Parts:
        handed.clear()
        for rank in range(size):
            info = DistributedInfo(rank, size, size > 1)
            monkeypatch.setattr("minisgl.distributed.info._info", info)
            run()
            assert len(handed) == rank + 1  # once a layer
        return list(handed)

    return run_all


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("size", SIZES)
def test_the_op_sums_over_ranks(size: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    weights, ids = scores.topk(top_k)
    whole = grouped_experts(x, gate_up, down, weights, ids)
    total = torch.zeros_like(whole)
    for rank in range(size):
        first, held = partition(EXPERTS, rank, size)
        mine = slice(first, first + held)
        part = grouped_experts(x, gate_up[mine], down[mine], weights, ids, first)
        others = (ids < first) | (ids >= first + held)
        zeroed = weights.masked_fill(others, 0)
        # The same sum: what is left out and what is multiplied by 0 differ in nothing.
        assert torch.equal(part, grouped_experts(x, gate_up, down, zeroed, ids))
        total += part
    # Sums of up to 5 terms of about 10 in another order.
    assert_close(total, whole, atol=2e-5)
    assert whole.abs().min() > 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", SIZES)
def test_the_layer_sums_over_ranks(size: int, routing: str, each_rank: Any) -> None:
    top_k = 1 if routing == "one" else 2
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    logits = ROUTINGS[routing](torch.randn(TOKENS, EXPERTS, generator=generator))
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    starts = iter([partition(EXPERTS, rank, size) for rank in range(size)])

    def run(whole: bool = False) -> None:
        layer = MoELayer(EXPERTS, top_k, HIDDEN, INNER, renormalize=True)
        first, held = (0, EXPERTS) if whole else next(starts)
        mine = slice(first, first + held)
        layer.load_state_dict({"gate_up_proj": gate_up[mine], "down_proj": down[mine]})
        layer.forward(x, logits)

    [whole] = each_rank(1, lambda: run(whole=True))
    parts = each_rank(size, run)
    assert_close(torch.stack(parts).sum(dim=0), whole, atol=2e-5)
    if routing == "one":  # all tokens are the third's, exactly
        busy = next(r for r in range(size) if 3 in range(*_bounds(r, size)))
        assert [bool(part.any()) for part in parts] == [rank == busy for rank in range(size)]
        assert torch.equal(parts[busy], whole)
    if size == 4:
        assert not parts[3].any()


def _bounds(rank: int, size: int) -> tuple[int, int]:
    span = partition(EXPERTS, rank, size)
    return span.start, span.end


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe", "mixtral", "qwen2-moe-packed"])
def test_loaded_layers_of_all_ranks_sum_to_the_whole(
    name: str, size: int, tmp_path: Path, each_rank: Any
) -> None:
    folder = make(name, tmp_path, num_experts=5, num_local_experts=5, num_key_value_heads=12)
    x = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(0))
    [whole] = each_rank(1, lambda: load_into_model(folder).model.layers[1].mlp.forward(x))
    parts = each_rank(size, lambda: load_into_model(folder).model.layers[1].mlp.forward(x))
    # Sums of 10 or 14 products of about 1e-2, in another order.
    assert_close(torch.stack(parts).sum(dim=0), whole, 1e-7)
