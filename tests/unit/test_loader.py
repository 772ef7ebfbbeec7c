"""Loading checkpoints: whatever is missing, broken or odd is one clear error.

The happy path, architecture by architecture, is in `tests/model/test_ch03_models.py`; what each
rank of tensor parallelism loads in `test_loader_parallel.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.errors import CheckpointError, ModelError, ModelNotFoundError
from minisgl.models import load_weight
from tests.unit.checkpoints import LAYER, Edit, checkpoint, load, load_into_model

pytestmark = pytest.mark.usefixtures("clean_state")


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
