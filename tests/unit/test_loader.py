"""Loading checkpoints: whatever is missing, broken or odd is one clear error, and TP shards fit.

The happy path, architecture by architecture, is in `tests/model/test_ch03_models.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.distributed import DistributedInfo
from minisgl.errors import CheckpointError, ModelError, ModelNotFoundError
from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model, load_weight, shard_tensor
from minisgl.utils import torch_dtype
from tools.make_checkpoint import make_checkpoint

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TINY = {
    "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 4, "vocab_size": 131, "max_position_embeddings": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
}  # fmt: skip
Edit = Callable[[dict[str, torch.Tensor]], None]
LAYER = "model.layers.1"


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws the same numbers, and the RoPE device set here is forgotten."""
    torch.manual_seed(0)
    monkeypatch.setattr("minisgl.layers.rotary._rope_device", None)


def config_of(name: str = "qwen3-0.6b", **changes: Any) -> dict[str, Any]:
    """A published config, shrunk."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    sizes = TINY if "moe" in raw["model_type"] else {k: TINY[k] for k in list(TINY)[:8]}
    return {**raw, **sizes, **changes}


def checkpoint(folder: Path, edit: Edit | None = None, **changes: Any) -> Path:
    """A tiny checkpoint; `edit` changes its tensors."""
    name = "qwen3-30b-a3b" if changes.pop("moe", False) else "qwen3-0.6b"
    make_checkpoint(config_of(name, **changes), folder, dtype="float32")
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Everything that the loader yields."""
    return dict(load_weight(str(folder), "cpu", dtype=dtype))


def load_into_model(folder: Path) -> Any:
    """What the engine does: build on meta, then load."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(torch.float32):
        model = create_model(ModelConfig.from_hf(SimpleNamespace(**config)))
    model.load_state_dict(load(folder))
    return model


def split(folder: Path, num_files: int, seed: int = 0) -> dict[str, str]:
    """Cut the single file into shards with the keys in random order; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    random.Random(seed).shuffle(keys)
    weight_map: dict[str, str] = {}
    for i in range(num_files):
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        own = {key: tensors[key] for key in keys[i::num_files]}
        save_file(own, folder / file)
        weight_map |= dict.fromkeys(own, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    content = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content, "utf-8")


# -- order and equality --------------------------------------------------------------------


def test_order_in_which_tensors_come(tmp_path: Path) -> None:
    names = list(load(checkpoint(tmp_path)))
    # Sorted by name; a merged projection comes when its last part was read, experts alike.
    assert names[:6] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    assert len(names) == len(set(names)) == 2 + 2 * 8 + 1


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_shards_in_any_order_equal_the_single_file(moe: bool, seed: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, moe=moe, attention_bias=True)
    whole = load(folder)
    weight_map = split(folder, 5, seed)
    q, k, v = (weight_map[f"{LAYER}.self_attn.{p}_proj.weight"] for p in "qkv")
    assert len({q, k, v}) > 1  # a merge spans files
    parts = load(folder)
    assert sorted(parts) == sorted(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    whole = load(folder)
    split(folder, 3)
    (folder / "model.safetensors.index.json").unlink()
    assert sorted(load(folder)) == sorted(whole)


def test_tables_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    load_into_model(checkpoint(tmp_path, edit))


# -- what does not fit ---------------------------------------------------------------------


def removing(*names: str) -> Edit:
    """An edit that removes tensors."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return edit


def test_a_lone_gate_is_an_incomplete_group(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, removing(f"{LAYER}.mlp.up_proj.weight"))
    message = rf"Incomplete merge groups: \['{LAYER}.mlp.gate_up_proj.weight \(has gate_proj\)'\]"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_missing_k_bias_is_an_incomplete_group(tmp_path: Path) -> None:
    edit = removing(f"{LAYER}.self_attn.k_proj.bias")
    folder = checkpoint(tmp_path, edit, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"qkv_proj.bias \(has q_proj, v_proj\)"):
        load(folder)


def test_parts_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.self_attn.k_proj.weight"] = torch.zeros(24, 23)

    message = rf"{LAYER}.self_attn.qkv_proj.weight: parts of \[\(48, 24\), \(24, 23\)"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(tmp_path, edit))


def test_missing_experts_are_named(tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.experts"
    edit = removing(f"{name}.1.down_proj.weight", f"{name}.3.down_proj.weight")
    folder = checkpoint(tmp_path, edit, moe=True)
    message = rf"Incomplete expert tensors: \['{name}.down_proj \(lacks \[1, 3\]\)'\]"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.experts"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.4.down_proj.weight"] = tensors[f"{name}.3.down_proj.weight"].clone()

    with pytest.raises(CheckpointError, match=rf"{name}.4.down_proj.weight .*does not fit 4"):
        load(checkpoint(tmp_path, edit, moe=True))


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.experts.2.down_proj.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(24, 9)

    message = rf"{name} \(24, 9\) does not fit 4 experts of \(24, 10\)"
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint(tmp_path, edit, moe=True))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, removing(f"{LAYER}.self_attn.q_norm.weight"))
    with pytest.raises(CheckpointError, match=rf"Missing key.*{LAYER}.self_attn.q_norm.weight"):
        load_into_model(folder)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.mlp.extra.weight"] = torch.zeros(2)

    message = rf"Unexpected keys in state_dict: \['{LAYER}.mlp.extra.weight'\]"
    with pytest.raises(CheckpointError, match=message):
        load_into_model(checkpoint(tmp_path, edit))


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.mlp.down_proj.weight"] = torch.zeros(24, 49)

    message = rf"{LAYER}.mlp.down_proj.weight: the model has \(24, 50\).*checkpoint \(24, 49\)"
    with pytest.raises(CheckpointError, match=message):
        load_into_model(checkpoint(tmp_path, edit))


# -- broken files --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    # Nothing, half the header's length, half the header, all but the last byte.
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"Can't read {file}"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"\x00" * 64, b"\xff" * 64, b"version https://git-lfs\n"])
def test_a_file_of_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"Can't read {file}"):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    weight_map = split(folder, 3)
    lost = "model-00002-of-00003.safetensors"
    (folder / lost).unlink()
    key = min(key for key, file in weight_map.items() if file == lost)
    with pytest.raises(CheckpointError, match=f"names {lost}, which is not there.*{key}"):
        next(load_weight(str(folder), "cpu"))  # before anything is yielded


def test_a_key_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    weight_map = split(folder, 2)
    write_index(folder, {**weight_map, "model.ghost": "model-00001-of-00002.safetensors"})
    message = r"model-00001-of-00002.safetensors lacks tensors its index names: \['model.ghost'\]"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_key_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    split(folder, 2)
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = load_file(second)
    twice = next(iter(load_file(first)))
    save_file({**tensors, twice: torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=f"{twice} is in .*{second.name}"):
        load(folder)


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/hostname", "sub/a.safetensors"])
def test_an_index_can_not_leave_its_folder(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    weight_map = split(folder, 2)
    write_index(folder, {**weight_map, "model.norm.weight": name})
    with pytest.raises(CheckpointError, match=f"names '{name}' for model.norm.weight"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, ["a"], "model.safetensors"])
def test_an_index_without_a_map_is_named(weight_map: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    split(folder, 2)
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="index.json has no 'weight_map'"):
        load(folder)


def test_an_index_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    split(folder, 2)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {', "utf-8")
    with pytest.raises(ModelError, match="index.json"):
        load(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", None])
def test_pickled_weights_are_not_read(file: str | None, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    if file is not None:
        torch.save({"model.norm.weight": torch.zeros(24)}, folder / file)
    with pytest.raises(ModelNotFoundError, match="no .*safetensors .pickled .* are not read"):
        load(folder)


# -- dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("module", ["mlp.down_proj", "self_attn.k_proj"])
def test_quantized_tensors_are_refused(dtype: torch.dtype, module: str, tmp_path: Path) -> None:
    name = f"{LAYER}.{module}.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    folder = checkpoint(tmp_path, edit)
    with pytest.raises(CheckpointError, match=f"{name} is stored as {dtype}, which is not"):
        load(folder, torch.float32)


@pytest.mark.parametrize(
    ("module", "stored"),
    [("mlp.down_proj", "mlp.down_proj"), ("mlp.gate_up_proj", "mlp.gate_proj")],
)
def test_values_beyond_float16_are_refused(module: str, stored: str, tmp_path: Path) -> None:
    name = f"{LAYER}.{stored}.weight"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            tensors[key] = tensor.to(torch.bfloat16)
        tensors[name][3, 4] = -70144.0

    folder = checkpoint(tmp_path, edit)
    with pytest.raises(CheckpointError, match=rf"{name} holds 70144, beyond float16's 65504"):
        load(folder, torch.float16)
    loaded = f"{LAYER}.{module}.weight"
    assert load(folder, torch.float32)[loaded][3, 4] == -70144.0
    assert load(folder)[loaded].dtype == torch.bfloat16


def test_tensors_are_converted_and_otherwise_left_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, moe=True)
    stored = load(folder)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, tensor in load(folder, dtype).items():
            assert tensor.is_contiguous()
            assert torch.equal(tensor, stored[name].to(dtype)), name


# -- tensor parallelism --------------------------------------------------------------------

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
