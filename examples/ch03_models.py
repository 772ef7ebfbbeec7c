"""Chapter 3, the models: a config becomes a model, a checkpoint becomes its weights.

    python tools/make_checkpoint.py tests/configs/qwen3-0.6b.json /tmp/qwen3-random
    python examples/ch03_models.py /tmp/qwen3-random

CHECKPOINT is a model's folder or a GGUF file; the first command makes one of random weights in
the published shapes (1.5 GB). Adds all of `models`: the registry and the loaders.

Prints what the config says, how long it took to build the model on the meta device, the first
tensors that the loader yields (q, k, v merged into `qkv_proj`, gate and up into `gate_up_proj`)
and how many it yielded. A tied model has no `lm_head.weight`: when the checkpoint brings one,
one more tensor is read than the model has, and loading drops it.
"""

from __future__ import annotations

import argparse
import time

import torch

from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model, load_model_info, load_weight
from minisgl.utils import torch_dtype

FIRST = 6


def print_config(config: ModelConfig) -> None:
    """The sizes that everything else follows from."""
    for name, value in (
        ("architecture", config.architectures[0]),
        ("layers", config.num_layers),
        ("query heads", config.num_qo_heads),
        ("KV heads", config.num_kv_heads),
        ("head size", config.head_dim),
        ("hidden size", config.hidden_size),
        ("vocabulary", config.vocab_size),
        ("RoPE base", int(config.rotary_config.base)),
        ("head tied to embedding", config.tie_word_embeddings),
    ):
        print(f"{name + ':':<24}{f'{value:,}' if type(value) is int else value}")


def describe(name: str, tensor: torch.Tensor) -> str:
    """One line for a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {tuple(tensor.shape)} {dtype} {tensor.device}"


def main() -> None:
    """Print the config, build the model, load it."""
    parser = argparse.ArgumentParser(description="From a checkpoint to a loaded model.")
    parser.add_argument("checkpoint", help="a model's folder, or a GGUF file")
    path = parser.parse_args().checkpoint
    info = load_model_info(path)
    print_config(info.config)

    start = time.perf_counter()
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(info.dtype):
        model = create_model(info.config)
    milliseconds = (time.perf_counter() - start) * 1000
    print(f"\nbuilt on meta in {milliseconds:.0f} ms: {len(model.state_dict())} tensors, ", end="")
    print(f"{model.num_params():,} parameters")

    print(f"\nthe first {FIRST} tensors that the loader yields:")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_weight(path, "cpu", dtype=info.dtype):
        if len(weights) < FIRST:
            print("  " + describe(name, tensor))
        weights[name] = tensor
    print(f"{len(weights)} tensors read")

    model.load_state_dict(weights)  # checks names, shapes and dtypes, and empties `weights`
    name = "model.layers.0.self_attn.qkv_proj.weight"
    print("\nloaded: " + describe(name, model.state_dict()[name]))


if __name__ == "__main__":
    main()
