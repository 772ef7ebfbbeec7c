"""Chapter 2, the layers: named weights around ops, and nothing else.

    python examples/ch02_layers.py tests/configs/qwen3-0.6b.json

CONFIG is a `config.json` or the folder that holds one. Uses `utils`, `core`, `distributed`,
`kernel`, `layers` and the decoder layer of `models`: no checkpoint, no cache, no engine.

Prints one decoder layer's weights, which are on the meta device: they have a name, a shape and a
dtype, but no memory. Then the largest difference of RMSNorm and RoPE from Hugging Face's, in
float32 at positions up to 8,192. Both are exactly 0.0: the ops do the same arithmetic in the
same order.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from minisgl.layers import RMSNorm, get_rope, set_rope_device
from minisgl.models import ModelConfig
from minisgl.models.decoder import DecoderLayer
from minisgl.utils import torch_dtype


def print_layer(config: ModelConfig) -> None:
    """Build layer 0 without memory and list its weights."""
    set_rope_device("cpu")  # the table of RoPE is computed, not loaded: it needs a real device
    qk_norm = config.model_type.startswith("qwen3")
    with torch.device("meta"), torch_dtype(torch.bfloat16):
        layer = DecoderLayer(config, 0, has_qk_norm=qk_norm, use_moe=config.is_sparse(0))
    for name, weight in layer.state_dict().items():
        print(f"{name} {tuple(weight.shape)}".ljust(50), weight.dtype, weight.device)
    print(f"{layer.num_params():,} parameters, 0 bytes of memory\n")


def norm_error(config: ModelConfig) -> float:
    """Largest difference of our RMSNorm from Hugging Face's."""
    x, weight = torch.randn(512, config.hidden_size) * 3, torch.randn(config.hidden_size)
    ours = RMSNorm(config.hidden_size, config.rms_norm_eps)
    ours.load_state_dict({"weight": weight})  # loading replaces the tensor, it copies nothing
    theirs = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
    theirs.weight.data = weight
    return (ours.forward(x) - theirs(x)).abs().max().item()


def rope_error(config: ModelConfig, hf_config: AutoConfig) -> float:
    """Largest difference of our rotated queries and keys from Hugging Face's."""
    rotary = config.rotary_config
    length = min(8192, rotary.max_context)
    positions = torch.arange(length)
    q = torch.randn(length, config.num_qo_heads, config.head_dim)
    k = torch.randn(length, config.num_kv_heads, config.head_dim)
    cos, sin = Qwen3RotaryEmbedding(hf_config)(q, positions[None])
    expected = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    rope = get_rope(
        rotary.head_dim, rotary.rotary_dim, rotary.max_position, rotary.base, rotary.scaling
    )
    rope.forward(positions, q, k)  # in place
    return max((a - b).abs().max().item() for a, b in zip((q, k), expected, strict=True))


@torch.inference_mode()
def main() -> None:
    """Print the layer, then both errors."""
    parser = argparse.ArgumentParser(description="The layers of one decoder layer.")
    parser.add_argument("config", help="a config.json, or the folder that holds one")
    hf_config = AutoConfig.from_pretrained(parser.parse_args().config)
    config = ModelConfig.from_hf(hf_config)
    torch.manual_seed(0)
    print_layer(config)
    print("RMSNorm max error:", norm_error(config))
    print("RoPE max error:", rope_error(config, hf_config))


if __name__ == "__main__":
    main()
