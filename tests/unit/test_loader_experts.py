"""Expert parallelism: a rank reads whole experts, its own, and of the others nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import DistributedInfo
from minisgl.errors import CheckpointError
from minisgl.layers import MoELayer
from minisgl.models import load_weight
from minisgl.models.random_weights import random_weights
from minisgl.models.shard import Share, find_cut, take
from minisgl.utils import partition
from tests.unit.checkpoints import LAYER, checkpoint, load, load_into_model
from tests.unit.gguf_files import Written
from tests.unit.test_loader_slices import PACKED, CountingFile, make

pytestmark = pytest.mark.usefixtures("clean_state")

NAMES = ("qwen3-moe", "qwen2-moe", "mixtral", *PACKED)
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}
SIZES = (2, 3, 4)  # of 5 experts: 3 and 2; 2, 2 and 1; 2, 2, 1 and none
Tensors = dict[str, torch.Tensor]
Become = Callable[..., None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Be this rank from here on, with whole experts unless `ep` is False."""

    def change(rank: int, size: int, ep: bool = True) -> None:
        info = DistributedInfo(rank, size, ep and size > 1)
        monkeypatch.setattr("minisgl.distributed.info._info", info)

    return change


def make_five(name: str, folder: Path) -> Path:
    return make(name, folder, num_experts=5, num_local_experts=5, **HEADS)


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def assert_shares(whole: Tensors, cut: Iterator[Tensors], shares: Iterator[Tensors]) -> None:
    """Experts concatenated over the ranks are the whole, all else is as without `ep`."""
    found = list(shares)
    for rank, (mine, dense) in enumerate(zip(found, cut, strict=True)):
        assert list(mine) == list(dense)
        for name in mine:
            if not is_expert(name):
                assert torch.equal(mine[name], dense[name]), (name, rank)
    for name in filter(is_expert, whole):
        lengths = [len(mine[name]) for mine in found]
        assert lengths == [partition(5, r, len(found)).length for r in range(len(found))]
        assert torch.equal(torch.cat([mine[name] for mine in found]), whole[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_all_ranks_are_all_experts(name: str, tmp_path: Path, become: Become) -> None:
    become(0, 1)
    folder = make_five(name, tmp_path)
    whole = load(folder)
    assert any(map(is_expert, whole))

    def each(size: int, ep: bool) -> Iterator[Tensors]:
        for rank in range(size):
            become(rank, size, ep)
            load_into_model(folder)  # raises if any name, shape or dtype differs
            yield load(folder)

    for size in SIZES:
        assert_shares(whole, each(size, False), each(size, True))


@pytest.mark.parametrize("name", NAMES)
def test_only_its_own_experts_are_read(
    name: str, tmp_path: Path, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(0, 1)
    folder = make_five(name, tmp_path)
    whole = load(folder)
    monkeypatch.setattr("safetensors.safe_open", CountingFile)
    for size in SIZES:
        for rank in range(size):
            become(rank, size)
            monkeypatch.setattr(CountingFile, "taken", 0)
            kept = load(folder)
            assert CountingFile.taken == sum(tensor.numel() for tensor in kept.values())
            share = sum(tensor.numel() for name, tensor in kept.items() if is_expert(name))
            stored = sum(tensor.numel() for name, tensor in whole.items() if is_expert(name))
            assert share * 5 == stored * partition(5, rank, size).length


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen2moe", "mixtral"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_gguf_files(arch: str, kind: str, tmp_path: Path, become: Become) -> None:
    written = Written(tmp_path / "m.gguf", arch, kind)
    whole = dict(load_weight(written.path, "cpu"))
    for size, lengths in ((2, [2, 1]), (3, [1, 1, 1])):  # of three
        parts = []
        for rank in range(size):
            become(rank, size)
            parts.append(dict(load_weight(written.path, "cpu")))
        for name in filter(is_expert, whole):
            assert [len(part[name]) for part in parts] == lengths
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


@pytest.mark.parametrize("stored", ["single", "packed", "gguf"])
def test_only_its_own_experts_are_checked_for_float16(
    stored: str, tmp_path: Path, become: Become
) -> None:
    if stored == "gguf":
        huge = {"blk.1.ffn_up_exps.weight": torch.zeros(3, 256, 256)}
        huge["blk.1.ffn_up_exps.weight"][2, 7, 8] = 7e4
        extra = {name: tensor.numpy() for name, tensor in huge.items()}
        path = Written(tmp_path / "m.gguf", "qwen3moe", extra=extra).path
    else:
        folder = make("qwen3-moe-packed" if stored == "packed" else "qwen3-moe", tmp_path)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        if stored == "packed":
            tensors[f"{LAYER}.mlp.experts.gate_up_proj"][2, 7, 8] = 7e4
        else:
            tensors[f"{LAYER}.mlp.experts.2.up_proj.weight"][7, 8] = 7e4
        save_file(tensors, file)
        path = str(folder)
    become(0, 2)
    dict(load_weight(path, "cpu", dtype=torch.float16))
    become(1, 2)
    with pytest.raises(CheckpointError, match="holds 70000, beyond float16's 65504"):
        dict(load_weight(path, "cpu", dtype=torch.float16))


# -- what does not fit, on every rank alike ------------------------------------------------

EXPERT = f"{LAYER}.mlp.experts"


def drop(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.1.down_proj.weight"]


def drop_up(tensors: Tensors) -> None:
    del tensors[f"{EXPERT}.2.up_proj.weight"]


def too_many(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.5.down_proj.weight"] = tensors[f"{EXPERT}.0.down_proj.weight"].clone()


def reshape(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.3.down_proj.weight"] = torch.zeros(24, 11)


def flatten(tensors: Tensors) -> None:
    tensors[f"{EXPERT}.3.down_proj.weight"] = torch.tensor(0.0)


def flatten_both(tensors: Tensors) -> None:
    for part in ("gate", "up"):
        tensors[f"{EXPERT}.3.{part}_proj.weight"] = torch.tensor(0.0)


def retype(tensors: Tensors) -> None:
    name = f"{EXPERT}.4.gate_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop, r"Incomplete expert tensors: .*experts\.down_proj \(lacks \[1\]\)"),
        (drop_up, r"experts\.2\.gate_up_proj\.weight \(has gate_proj\)"),
        (too_many, r"experts\.5\.down_proj\.weight \(24, 10\) does not fit 5 experts"),
        (reshape, r"experts\.3\.down_proj\.weight \(24, 11\) does not fit 5 experts of \(24, 10\)"),
        (flatten, r"experts\.3\.down_proj\.weight \(\) does not fit 5 experts of \(24, 10\)"),
        (flatten_both, r"experts\.3\.gate_up_proj\.weight: parts of \[\(\), \(\)\] don't fit"),
        (retype, r"experts\.4\.gate_proj\.weight is stored as torch\.float8_e4m3fn"),
    ],
)
def test_every_rank_refuses_what_does_not_fit(
    edit: Any, message: str, tmp_path: Path, become: Become
) -> None:
    folder = checkpoint(tmp_path, edit, moe=True, num_experts=5, **HEADS)
    for size in (1, 2, 4):
        for rank in range(size):
            become(rank, size)
            with pytest.raises(CheckpointError, match=message):
                load(folder)


def test_packed_experts_of_another_count_are_refused(tmp_path: Path, become: Become) -> None:
    folder = make("qwen3-moe-packed", tmp_path)
    file = folder / "model.safetensors"
    save_file({k: v[:3] if is_expert(k) else v for k, v in load_file(file).items()}, file)
    become(1, 2)
    with pytest.raises(CheckpointError, match=r"the model has \(2, 20, 24\).*\(1, 20, 24\)"):
        load_into_model(folder)


# -- the rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_which_experts_are_whose(size: int) -> None:
    owners = []
    packed = torch.arange(5)[:, None, None].expand(5, 6, 4)
    for rank in range(size):
        share = Share(rank, size, num_kv_heads=1, num_experts=5, ep=True)
        for part in ("gate_proj", "up_proj", "down_proj"):
            here = [i for i in range(5) if not share.is_elsewhere(f"{EXPERT}.{i}.{part}.weight")]
            assert here == list(share.experts)
        for part in ("gate_up_proj", "down_proj"):
            held = take(packed, find_cut(f"{EXPERT}.{part}", packed.shape, rank, size, 1, True))
            assert held.shape == (len(here), 6, 4)
            assert held[:, 0, 0].tolist() == here
        single = torch.randn(6, 4)
        for i in here:
            name = f"{EXPERT}.{i}.down_proj.weight"
            assert torch.equal(share.part(name, single, single.shape), single)
        owners += here
        for name in (f"{EXPERT}.gate_up_proj", f"{LAYER}.mlp.shared_expert.up_proj.weight",
                     f"{LAYER}.mlp.gate.weight", f"{EXPERT}.7.up_proj.weight"):  # fmt: skip
            assert not share.is_elsewhere(name)
    assert owners == list(range(5))


def test_an_expert_elsewhere_is_a_shape() -> None:
    share = Share(0, 2, num_kv_heads=2, num_experts=5, ep=True)
    tensor = torch.randn(6, 4, dtype=torch.bfloat16)
    part = share.part(f"{EXPERT}.4.up_proj.weight", tensor, tensor.shape)
    assert (part.device.type, part.shape, part.dtype) == ("meta", (6, 4), torch.bfloat16)


def test_ranks_draw_the_same_random_router(become: Become) -> None:
    drawn = []
    for rank in range(2):
        become(rank, 2)
        layer = MoELayer(3, 2, 8, 6, renormalize=True)  # two experts, and one
        layer.gate = torch.empty(3, 8)  # after them
        drawn.append(dict(random_weights(layer, torch.device("cpu"))))  # type: ignore[arg-type]
    assert len(drawn[0]["down_proj"]) != len(drawn[1]["down_proj"])
    assert torch.equal(drawn[0]["gate"], drawn[1]["gate"])
