"""Writes a GGUF file's model, dequantized, as a folder in Hugging Face's format.

    python export_checkpoint.py MODEL.gguf FOLDER [--dtype bfloat16]

Runs where `transformers`, `torch`, `accelerate` and `gguf` are, minisgl's environment for one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load by `transformers` and save model and tokenizer."""
    parser = argparse.ArgumentParser(description="From a GGUF file to a folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    source = {
        "pretrained_model_name_or_path": options.gguf.parent,
        "gguf_file": options.gguf.name,
    }
    dtype = getattr(torch, options.dtype)
    loaded = AutoModelForCausalLM.from_pretrained(dtype=dtype, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # it calls a GGUF's model quantized to the end
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(options.folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
