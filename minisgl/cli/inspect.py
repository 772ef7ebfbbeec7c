"""`minisgl inspect`: what a model is and what fits here, without loading its weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.resolve import resolve

from .flags import add_flags, from_flags

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig

__all__ = ["add_parser"]

_OPTIONS = ("dtype", "quantization", "kv_dtype")
"""What of the engine's configuration says how many bytes a weight or a token takes."""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        parents=[common],
        help="show a model's shape and what fits here",
        description="Show architecture, sizes and what fits on this machine; loads no weights.",
    )
    parser.add_argument("model", help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    others = [field.name for field in fields(EngineConfig) if field.name not in _OPTIONS]
    add_flags(parser, EngineConfig, "engine", skip=others)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the facts as aligned lines or as JSON."""
    facts = _facts(arguments.model, from_flags(EngineConfig, arguments))
    if arguments.json:
        print(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if type(value) is int else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")


def _facts(model: str, asked: EngineConfig) -> dict[str, Any]:
    import torch

    from minisgl.kernel.cpu import has_native
    from minisgl.models.checkpoint import load_model_info
    from minisgl.utils import dtype_name
    from minisgl.utils.hardware import Hardware
    from minisgl.utils.hf import resolve_model_path

    path = resolve_model_path(model)
    info = load_model_info(path)
    config = info.config
    hardware = Hardware.detect()
    if not hardware.has_cuda:
        hardware = replace(hardware, has_native=has_native())
    resolved = resolve(asked, hardware, info.facts())
    parameters, weight_bytes = _sizes(path, config, resolved)
    free = hardware.available_bytes
    if hardware.has_cuda:
        free = torch.cuda.mem_get_info()[0]
    kv_bytes = config.kv_bytes_per_token(resolved.kv_dtype)
    context = config.rotary_config.max_context
    tokens = max(0, free - weight_bytes) // kv_bytes
    facts: dict[str, Any] = {
        "path": path,
        "architecture": config.architectures[0],
        "parameters": parameters,
        "dtype": dtype_name(resolved.dtype),
        "quantization": resolved.quantization,
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
        "kv_dtype": dtype_name(resolved.kv_dtype),
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


def _sizes(path: str, config: ModelConfig, resolved: ResolvedConfig) -> tuple[int, int]:
    """Parameters, and bytes of all weights as the engine holds them."""
    import torch

    from minisgl.layers import set_rope_device
    from minisgl.models import create_model, plan_storage, set_storage
    from minisgl.utils import torch_dtype

    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(resolved.dtype):
        no_table = replace(config.rotary_config, table_length=1)
        model = create_model(replace(config, rotary_config=no_table))
    set_storage(model, plan_storage(path, resolved.quantization, config))
    return model.num_params(), model.num_bytes()
