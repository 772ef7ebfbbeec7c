"""`minisgl inspect`: what a model is and what fits here, without loading its weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

__all__ = ["add_parser"]


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        parents=[common],
        help="show a model's shape and what fits here",
        description="Show architecture, sizes and what fits on this machine; loads no weights.",
    )
    parser.add_argument("model", help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of weights and KV cache to count with",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the facts as aligned lines or as JSON."""
    facts = _facts(arguments.model, arguments.dtype)
    if arguments.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if type(value) is int else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")


def _facts(model: str, dtype_name: str) -> dict[str, Any]:
    import torch

    from minisgl.layers import set_rope_device
    from minisgl.models import create_model
    from minisgl.models.checkpoint import load_model_info
    from minisgl.utils import parse_dtype, torch_dtype
    from minisgl.utils.hardware import Hardware
    from minisgl.utils.hf import resolve_model_path

    path = resolve_model_path(model)
    info = load_model_info(path)
    config = info.config
    dtype = info.dtype if dtype_name == "auto" else parse_dtype(dtype_name)
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(dtype):
        no_table = replace(config.rotary_config, table_length=1)
        parameters = create_model(replace(config, rotary_config=no_table)).num_params()
    hardware, weight_bytes = Hardware.detect(), parameters * dtype.itemsize
    free = hardware.available_bytes
    if hardware.has_cuda:
        free = torch.cuda.mem_get_info()[0]
    kv_bytes, context = config.kv_bytes_per_token(dtype), config.rotary_config.max_context
    tokens = max(0, free - weight_bytes) // kv_bytes
    facts: dict[str, Any] = {
        "path": path,
        "architecture": config.architectures[0],
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": weight_bytes,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "query_heads": config.num_qo_heads,
        "kv_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "vocabulary": config.vocab_size,
        "tied_head": config.tie_word_embeddings,
        "context": context,
        "sliding_window": config.sliding_window,
        "rope": dict(config.rotary_config.scaling or {}).get("rope_type", "default"),
        "kv_bytes_per_token": kv_bytes,
        "device": "cuda" if hardware.has_cuda else "cpu",
        "available_bytes": free,
        "weights_fit": weight_bytes < free,
        "kv_tokens_that_fit": tokens,
        "full_contexts_that_fit": tokens // context,
    }
    if config.is_moe:
        facts["experts"] = f"{config.num_experts}, {config.num_experts_per_tok} a token"
    return facts
