"""Streaming checkpoints into the model's own names and shapes.

    read (safetensors or GGUF, sorted by name, one tensor at a time)
      -> this rank's shard          see `shard.py`; of safetensors nothing else is read, and of
                                    other ranks' experts nothing at all
      -> checked                    that the target dtype can hold it
      -> blocks                     those that `storage` names, one by one; see `quantize.py`
      -> merged projections         q, k, v -> qkv_proj;  gate, up -> gate_up_proj
      -> packed experts             experts.0 ... experts.E-1 -> [E, ...], this rank's E
      -> target dtype and device

Each stage is a generator that holds only what is incomplete, so that the memory in use is the
model, one tensor, and the merge buffer. What is merged or packed is written in the target dtype
at once: copies in the stored one would leave holes in the heap, some 12 MB a layer. Tensors
that need no work are views of the mapped file; the system reads their pages when they are used.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from minisgl.distributed import get_tp_info
from minisgl.errors import CheckpointError, ModelNotFoundError
from minisgl.kernel.quant import BLOCKS
from minisgl.utils.hf import is_gguf, read_json

from .checkpoint import load_model_config
from .fields import shown
from .quantize import Storage, parts_by_tensor, quantize_parts
from .shard import EXPERT, Share, shard_tensor

__all__ = ["load_weight", "shard_tensor"]

NamedTensor = tuple[str, torch.Tensor]

_MERGED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_MIXTRAL_EXPERT = re.compile(r"(\.experts\.\d+)\.(w[123])\.")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_weight(
    model_path: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    storage: Storage | None = None,
) -> Iterator[NamedTensor]:
    """Yield `(name, tensor)` for this rank, under the names of the model's `state_dict()`.

    `model_path` is a folder with safetensors (one file, or shards with an index) or a GGUF
    file, whose quantized tensors are dequantized. `dtype` None keeps the stored type (float32
    for quantized ones). A tied model's `lm_head.weight` is yielded when the file has it. Weights
    of the ops that `storage` names (see `plan_storage`) come in parts of the types that it says,
    blocks as uint8; that is for one rank.
    Raises `CheckpointError` naming file and key for whatever is missing, incomplete or
    unreadable, and `ModelNotFoundError` when there are no weights.
    """
    config, tp = load_model_config(model_path), get_tp_info()
    share = Share(tp.rank, tp.size, config.num_kv_heads, config.num_experts, tp.ep)
    parts = parts_by_tensor(storage or {}, config.num_experts)
    blocks: dict[str, str] = {}
    if is_gguf(model_path):
        blocks = {name: part.type for name, part in parts.items() if part.type in BLOCKS}
        shards = _read_gguf(model_path, dtype, blocks, share)
    else:
        shards = _read_safetensors(model_path, share)
    stored = quantize_parts(_checked(shards, dtype, blocks), parts)
    for name, tensor in _pack_experts(_merge(stored, dtype), share, dtype):
        yield name, tensor.to(device=device, dtype=_target(tensor, dtype)).contiguous()


def _target(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a tensor in the model: blocks stay bytes."""
    return tensor.dtype if dtype is None or tensor.dtype == torch.uint8 else dtype


def _read_gguf(
    path: str, dtype: torch.dtype | None, blocks: Mapping[str, str], share: Share
) -> Iterator[NamedTensor]:
    """This rank's part of all tensors, which are dequantized whole."""
    from .gguf import gguf_num_tensors, iter_gguf_tensors

    if dtype == torch.float16:
        dtype = None  # what it can't hold must be seen before it is rounded
    tensors = iter_gguf_tensors(path, dtype, blocks, share.is_elsewhere)
    for name, tensor in _progress(tensors, gguf_num_tensors(path)):
        yield name, share.part(name, tensor, tensor.shape)


def _read_safetensors(folder: str, share: Share) -> Iterator[NamedTensor]:
    """This rank's part of all tensors, file by file and sorted by name within a file."""
    from safetensors import SafetensorError, safe_open

    keys_of = _files(Path(folder))
    seen: set[str] = set()

    def read() -> Iterator[NamedTensor]:
        for file, promised in keys_of.items():
            try:
                with safe_open(file, framework="pt") as handle:
                    keys = sorted(handle.keys())
                    missing = sorted(promised - set(keys))
                    if missing:
                        raise CheckpointError(f"{file} lacks tensors its index names: {missing}")
                    for key in keys:
                        if key in seen:
                            raise CheckpointError(f"{key} is in two files, again in {file}")
                        seen.add(key)
                        if not key.endswith("rotary_emb.inv_freq"):  # old files store the table
                            stored = handle.get_slice(key)
                            name = _model_name(key)
                            yield name, share.part(name, stored, stored.get_shape())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"Can't read {file}: {error}") from error

    yield from _progress(read(), sum(map(len, keys_of.values())) or None)


def _model_name(key: str) -> str:
    """A checkpoint's key as Qwen's checkpoints would have it: only Mixtral has other names."""
    if ".block_sparse_moe." not in key:
        return key
    key = key.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL_EXPERT.sub(lambda m: f"{m[1]}.{_MIXTRAL[m[2]]}.", key)


def _files(folder: Path) -> dict[Path, set[str]]:
    """Weight files in reading order, each with the keys that the index promises in it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        others = sorted(p for p in folder.glob("*.safetensors") if "consolidated" not in p.name)
        if others:
            return {path: set() for path in others}
        raise ModelNotFoundError(
            f"{folder} has no *.safetensors (pickled *.bin or *.pt weights are not read: "
            "convert them to safetensors)"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no 'weight_map'")
    for key, name in weight_map.items():
        if not _is_file_name(name):
            raise CheckpointError(
                f"{index} names {shown(name)} for {key}: not a file of its folder"
            )
    files: dict[Path, set[str]] = {folder / name: set() for name in sorted(weight_map.values())}
    for key, name in weight_map.items():
        files[folder / name].add(key)
    for path, keys in files.items():
        if not path.is_file():
            raise CheckpointError(
                f"{index} names {path.name}, which is not there; it should hold "
                f"{len(keys)} tensors such as {min(keys)}"
            )
    return files


def _is_file_name(name: object) -> bool:
    """Whether it is a string that names something in a folder, and neither the folder nor above."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and name.isprintable()
    return plain and Path(str(name)).name == name and len(str(name).encode()) <= 255


def _progress(tensors: Iterator[NamedTensor], total: int | None) -> Iterator[NamedTensor]:
    # disable=None: no bar when stderr is not a terminal.
    disable = None if get_tp_info().is_primary() else True
    yield from tqdm(tensors, "Loading weights", total, disable=disable, leave=False)


def _checked(
    tensors: Iterator[NamedTensor], dtype: torch.dtype | None, blocks: Container[str] = ()
) -> Iterator[NamedTensor]:
    """The same tensors; raises for one whose type is not read or that `dtype` can't hold.

    Those that `blocks` names may be bytes.
    """
    for name, tensor in tensors:
        if tensor.dtype == torch.uint8 and name in blocks:
            yield name, tensor
            continue
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is stored as {tensor.dtype}, which is not supported; "
                "convert the checkpoint to float32, bfloat16 or float16"
            )
        here = tensor.numel() > 0 and not tensor.is_meta
        if dtype == torch.float16 and tensor.dtype != torch.float16 and here:
            worst = tensor.abs().max().item()
            if worst > torch.finfo(torch.float16).max:
                raise CheckpointError(
                    f"{name} holds {worst:g}, beyond float16's 65504: "
                    "use --dtype bfloat16 or float32"
                )
        yield name, tensor


def _merge(tensors: Iterator[NamedTensor], dtype: torch.dtype | None) -> Iterator[NamedTensor]:
    """Stack the parts of a projection along dim 0 once all have come, in whatever order."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        stem, module, kind = ("." + name).rsplit(".", 2)
        if module not in _MERGED:
            yield name, tensor
            continue
        merged, parts = _MERGED[module]
        key = f"{stem}.{merged}.{kind}".removeprefix(".")
        group = groups.setdefault(key, {})
        group[module] = tensor
        if len(group) == len(parts):
            del groups[key]
            yield key, _stack(key, [group[part] for part in parts], dtype)
            del group, tensor
    if groups:
        names = [f"{key} (has {', '.join(sorted(g))})" for key, g in sorted(groups.items())]
        raise CheckpointError(f"Incomplete merge groups: {names}")


def _stack(key: str, parts: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    """The parts one after another along dim 0, in `dtype` (None: the first part's)."""
    if len({(part.dim(), part.shape[1:]) for part in parts}) > 1 or parts[0].dim() == 0:
        raise CheckpointError(f"{key}: parts of {[tuple(p.shape) for p in parts]} don't fit")
    out = parts[0].new_empty(
        (sum(map(len, parts)), *parts[0].shape[1:]), dtype=_target(parts[0], dtype)
    )
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _pack_experts(
    tensors: Iterator[NamedTensor], share: Share, dtype: torch.dtype | None
) -> Iterator[NamedTensor]:
    """Copy the tensor of each expert that the rank holds to its place in one `[E, ...]` tensor.

    All experts must come, those that are elsewhere by their shape alone.
    """
    packed: dict[str, torch.Tensor] = {}
    missing: dict[str, set[int]] = {}
    for name, tensor in tensors:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        key, expert = f"{match['stem']}.{match['name']}", int(match["expert"])
        if key not in packed:
            shape = (len(share.experts), *tensor.shape)
            packed[key] = torch.empty(shape, dtype=_target(tensor, dtype), device="cpu")
            missing[key] = set(range(share.num_experts))
        if expert not in missing[key] or tensor.shape != packed[key].shape[1:]:
            raise CheckpointError(
                f"{name} {tuple(tensor.shape)} does not fit {share.num_experts} experts of "
                f"{tuple(packed[key].shape[1:])}"
            )
        if expert in share.experts:
            packed[key][expert - share.experts.start] = tensor
        missing[key].discard(expert)
        if not missing[key]:
            del missing[key]
            yield key, packed.pop(key)
    if missing:
        names = [f"{key} (lacks {sorted(m)[:8]})" for key, m in sorted(missing.items())]
        raise CheckpointError(f"Incomplete expert tensors: {names}")
