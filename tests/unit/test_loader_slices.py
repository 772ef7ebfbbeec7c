"""A rank reads its own part of each tensor from the file, and not one element more.

What that part is says `shard_tensor`, whose rules are tested in `test_loader_parallel.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import DistributedInfo
from minisgl.errors import CheckpointError
from minisgl.models import load_weight, shard_tensor
from tests.unit.checkpoints import LAYER, checkpoint, config_of, load, load_into_model
from tools.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.usefixtures("clean_state")

SHARED = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "qkv_bias": True,
    "shared_expert_intermediate_size": 14,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "intermediate_size": 10,
}  # fmt: skip
# 131 for the vocabulary, and 50, 10 and 14 for MLPs: 3 and 4 divide none of them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-0.6b", {"attention_bias": True, "tie_word_embeddings": False}),
    "tied": ("qwen3-0.6b", {}),
    "all-biases": ("llama-3.1-8b-instruct", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-moe": ("qwen3-30b-a3b", {"decoder_sparse_step": 2}),
    "qwen2-moe": ("qwen3-30b-a3b", SHARED),
    "mixtral": ("qwen3-30b-a3b", MIXTRAL),
}
PACKED = ("qwen3-moe-packed", "qwen2-moe-packed", "mixtral-packed")
RANKS = [(size, rank) for size in (1, 2, 3, 4) for rank in range(size)]


def become(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Be this rank from here on."""
    monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(rank, size))


def make(name: str, folder: Path, **changes: Any) -> Path:
    """The checkpoint of one of `MODELS` or `PACKED`."""
    base, own = MODELS[name.removesuffix("-packed")]
    make_checkpoint(config_of(base, **{**own, **changes}), folder, dtype="float32")
    if name in PACKED:
        pack(folder)
    return folder


def model_name(key: str) -> str:
    """What Qwen's checkpoints would call a tensor of Mixtral's."""
    name = key.replace("block_sparse_moe", "mlp")
    for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def pack(folder: Path) -> None:
    """Rewrite the experts as transformers 5 may save them: `[E, ...]`, under the model's names."""
    whole = load(folder)  # one rank's
    tensors = load_file(folder / "model.safetensors")
    kept = {model_name(k): v for k, v in tensors.items() if ".experts." not in k}
    packed = {k: v.clone() for k, v in whole.items() if ".experts." in k}
    assert packed
    save_file({**kept, **packed}, folder / "model.safetensors")


def of_whole_tensors(folder: Path, rank: int, size: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """What the loader gives when it reads whole tensors and cuts them by `shard_tensor`."""
    reader = "minisgl.models.weight._read_safetensors"

    def read(path: str, _cut_of: object) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in sorted(load_file(Path(path) / "model.safetensors").items()):
            name = model_name(key)
            yield name, shard_tensor(name, tensor, rank, size, kv_heads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, read)
        return load(folder)


@pytest.mark.parametrize("name", [*MODELS, *PACKED])
def test_slices_equal_shards_of_whole_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kv_heads in (12, 3, 2, 1):  # cut, and replicated where ranks outnumber them
        become(monkeypatch, 0, 1)
        folder = make(name, tmp_path / str(kv_heads), num_key_value_heads=kv_heads)
        for size, rank in RANKS:
            if size % kv_heads and kv_heads % size:
                continue
            become(monkeypatch, rank, size)
            found, expected = load(folder), of_whole_tensors(folder, rank, size, kv_heads)
            assert list(found) == list(expected)
            for key, tensor in found.items():
                assert torch.equal(tensor, expected[key]), (key, rank, size, kv_heads)
            load_into_model(folder)  # raises if any name, shape or dtype differs


# -- how much is read ----------------------------------------------------------------------


class CountingFile:
    """Stands in for `safe_open`'s handle and counts elements; there is no other way to read."""

    taken = 0
    _open = safetensors.safe_open

    def __init__(self, file: Path, framework: str) -> None:
        self._file = CountingFile._open(file, framework=framework)

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._file.__exit__(*args)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, key: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(key))


class CountingSlice:
    """A tensor in the file."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_shape(self) -> list[int]:
        return self._inner.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._inner[index]
        CountingFile.taken += tensor.numel()
        return tensor


@pytest.mark.parametrize("name", [*MODELS, *PACKED])
def test_a_rank_reads_what_it_keeps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(name, tmp_path, num_key_value_heads=12, vocab_size=1001)
    sizes = {model_name(k): v for k, v in load_file(folder / "model.safetensors").items()}
    stored = sum(tensor.numel() for tensor in sizes.values())
    monkeypatch.setattr("safetensors.safe_open", CountingFile)
    total = 0
    for rank in range(4):
        become(monkeypatch, rank, 4)
        monkeypatch.setattr(CountingFile, "taken", 0)
        kept = sum(tensor.numel() for tensor in load(folder).values())
        assert CountingFile.taken == kept
        assert 0.23 < kept / stored < 0.27
        total += kept
    # Norms, the router and the biases after a sum are on all ranks; nothing else is twice.
    on_all = ("norm.weight", ".gate.weight", "_gate.weight", "o_proj.bias", "down_proj.bias")
    assert total == stored + 3 * sum(t.numel() for k, t in sizes.items() if k.endswith(on_all))


def mapped_bytes(file: Path) -> int:
    """Memory of this process that is pages of `file`."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if line.split(" ", 1)[0].count("-") == 1 and ":" not in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_pages_of_the_file_that_a_rank_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The table is nearly all of it, and cut by rows. (Columns are finer than what a system maps
    # at a time, up to 2 MiB: there only the copy is smaller, which the test above counts.)
    raw = config_of(hidden_size=64, num_hidden_layers=1, vocab_size=250_000)
    folder = make_checkpoint(raw, tmp_path, dtype="float32", write_tied_head=False)
    file = folder / "model.safetensors"
    for rank, size, low, high in ((0, 1, 0.95, 1.01), (1, 4, 0.2, 0.35), (3, 4, 0.2, 0.35)):
        become(monkeypatch, rank, size)
        tensors = load(folder)
        assert all(tensor.isfinite().all() for tensor in tensors.values())  # touches all of them
        share = mapped_bytes(file) / file.stat().st_size
        assert low < share < high, f"rank {rank} of {size}: {share:.3f} of the file"
        del tensors


# -- what does not fit ---------------------------------------------------------------------


def test_only_this_ranks_values_are_checked_for_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{LAYER}.mlp.down_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 40] = 70000.0  # 50 columns over 4 ranks: 13 each, so rank 3's

    folder = checkpoint(tmp_path, edit, num_key_value_heads=4)
    for rank in range(4):
        become(monkeypatch, rank, 4)
        if rank < 3:
            load(folder, torch.float16)
            continue
        with pytest.raises(CheckpointError, match=f"{name} holds 70000, beyond float16's 65504"):
            load(folder, torch.float16)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        ("mlp.down_proj", (24,), r"\(24,\) has no dimension 1, which ranks share"),
        ("mlp.up_proj", (), r"\(\) has no dimension 0, which ranks share"),
        ("self_attn.k_proj", (9, 24), r"\(9, 24\) has no 2 heads of one size"),
    ],
)
def test_shapes_that_can_not_be_cut_are_named(
    module: str, shape: tuple[int, ...], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = f"{LAYER}.{module}.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(shape)

    folder = checkpoint(tmp_path, edit, num_key_value_heads=2)
    become(monkeypatch, 1, 4)
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        load(folder)


def test_mixtral_keys_in_shards(tmp_path: Path) -> None:
    folder = make("mixtral", tmp_path / "one")
    whole = load(folder)
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    many = make_checkpoint(raw, tmp_path / "many", dtype="float32", max_shard_bytes=9000)
    assert len(list(many.glob("*.safetensors"))) > 2
    split = dict(load_weight(str(many), "cpu"))
    assert sorted(split) == sorted(whole)
    assert all(torch.equal(split[name], whole[name]) for name in whole)
    stored = load_file(folder / "model.safetensors")
    moe = f"{LAYER}.block_sparse_moe"
    assert torch.equal(whole[f"{LAYER}.mlp.gate.weight"], stored[f"{moe}.gate.weight"])
    for expert in range(4):
        w1, w2, w3 = (stored[f"{moe}.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
        gate_up = whole[f"{LAYER}.mlp.experts.gate_up_proj"][expert]
        assert torch.equal(gate_up, torch.cat((w1, w3)))
        assert torch.equal(whole[f"{LAYER}.mlp.experts.down_proj"][expert], w2)
