"""Tensor parallelism: the shards of all ranks are the tensor, and fit each rank's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.distributed import DistributedInfo
from minisgl.models import shard_tensor
from tests.helpers import assert_close
from tests.unit.checkpoints import LAYER, checkpoint, load_into_model

pytestmark = pytest.mark.usefixtures("clean_state")

# 12 query heads; KV heads as fit the sizes: (size, KV heads).
SHARDINGS = [
    (1, 6),
    (2, 2),
    (2, 1),
    (2, 6),
    (3, 6),
    (3, 3),
    (3, 1),
    (4, 12),
    (4, 4),
    (4, 2),
    (4, 1),
]


def shards(name: str, tensor: torch.Tensor, size: int, kv_heads: int = 1) -> list[torch.Tensor]:
    """The parts of all ranks."""
    return [shard_tensor(name, tensor, rank, size, kv_heads) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_concatenated_are_the_tensor(size: int) -> None:
    # 131, 50 and 5 are divisible by none of 2, 3, 4 (but 50 by 2); 2 leaves ranks without any.
    for rows in (131, 50, 5, 2):
        tensor, bias = torch.randn(rows, 7), torch.randn(rows)
        for name in ("model.embed_tokens", "lm_head", f"{LAYER}.mlp.gate_proj",
                     f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.experts.3.up_proj"):  # fmt: skip
            assert torch.equal(torch.cat(shards(f"{name}.weight", tensor, size)), tensor), name
            assert torch.equal(torch.cat(shards(f"{name}.bias", bias, size)), bias), name
        for name in (f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.experts.0.down_proj"):
            parts = shards(f"{name}.weight", tensor.T, size)
            assert torch.equal(torch.cat(parts, dim=1), tensor.T), name
    wide, bias = torch.randn(24, 48), torch.randn(24)
    assert torch.equal(torch.cat(shards(f"{LAYER}.self_attn.q_proj.weight", wide, size)), wide)
    parts = shards(f"{LAYER}.self_attn.o_proj.weight", wide, size)
    assert torch.equal(torch.cat(parts, dim=1), wide)
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias", "input_layernorm.weight",
                 "self_attn.q_norm.weight"):  # fmt: skip
        assert all(torch.equal(p, bias) for p in shards(f"{LAYER}.{name}", bias, size)), name
    gates = shards(f"{LAYER}.mlp.gate.weight", wide, size)  # the router, not gate_proj
    assert all(torch.equal(part, wide) for part in gates)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_packed_experts_are_cut_like_single_ones(size: int) -> None:
    gate, up, down = torch.randn(3, 10, 8), torch.randn(3, 10, 8), torch.randn(3, 8, 10)
    name = f"{LAYER}.mlp.experts"
    packed = shards(f"{name}.gate_up_proj", torch.cat((gate, up), dim=1), size)
    halves = [part.chunk(2, dim=1) for part in packed]
    assert torch.equal(torch.cat([half[0] for half in halves], dim=1), gate)
    assert torch.equal(torch.cat([half[1] for half in halves], dim=1), up)
    assert torch.equal(torch.cat(shards(f"{name}.down_proj", down, size), dim=2), down)


@pytest.mark.parametrize(("size", "kv_heads"), SHARDINGS)
def test_each_rank_has_the_kv_heads_of_its_queries(size: int, kv_heads: int) -> None:
    head_dim, heads = 2, 12
    number = torch.arange(kv_heads).repeat_interleave(head_dim)  # the head that a row is of
    for part in ("k", "v"):
        weight, bias = number[:, None].expand(-1, 5), number
        for rank in range(size):
            name = f"{LAYER}.self_attn.{part}_proj"
            rows = shard_tensor(f"{name}.bias", bias, rank, size, kv_heads)
            matrix = shard_tensor(f"{name}.weight", weight, rank, size, kv_heads)
            assert torch.equal(matrix[:, 0], rows)
            local = rows[::head_dim].tolist()
            assert rows.tolist() == [h for h in local for _ in range(head_dim)]  # whole heads
            group = (heads // size) // len(local)
            for j in range(heads // size):
                query = rank * (heads // size) + j
                assert local[j // group] == query // (heads // kv_heads)


@pytest.mark.parametrize(("size", "kv_heads"), SHARDINGS)
@pytest.mark.parametrize("moe", [False, True])
def test_every_rank_loads_what_its_model_has(
    size: int, kv_heads: int, moe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(
        tmp_path, moe=moe, num_key_value_heads=kv_heads, tie_word_embeddings=False,
        attention_bias=True,
    )  # fmt: skip
    for rank in range(size):
        monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(rank, size))
        model = load_into_model(folder)  # raises if any name, shape or dtype differs
        qkv = model.model.layers[0].self_attn.qkv_proj.weight
        assert qkv.shape[0] == (12 // size + 2 * max(1, kv_heads // size)) * 4
        rows = [44, 44, 43] if size == 3 else [33, 33, 33, 32] if size == 4 else [66, 65]
        assert model.lm_head.weight.shape[0] == (131 if size == 1 else rows[rank])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_expert_layers_of_all_ranks_sum_to_the_whole(
    shared: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 14,
    } if shared else {}  # fmt: skip
    folder = checkpoint(tmp_path, moe=True, num_key_value_heads=1, **changes)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(0))
    reduced: list[torch.Tensor] = []

    def all_reduce(_self: object, part: torch.Tensor) -> torch.Tensor:
        reduced.append(part)
        return part

    monkeypatch.setattr("minisgl.distributed.DistributedCommunicator.all_reduce", all_reduce)
    whole = load_into_model(folder).model.layers[1].mlp.forward(x)
    reduced.clear()
    for rank in range(size):
        monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(rank, size))
        load_into_model(folder).model.layers[1].mlp.forward(x)
    assert len(reduced) == size  # once a layer, whether there is a shared expert or not
    # Sums of 10 or 14 products of about 1e-2, in another order.
    assert_close(torch.stack(reduced).sum(dim=0), whole, 1e-7)
