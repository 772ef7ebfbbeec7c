"""What a model on disk says of itself: its config and its generation defaults."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minisgl.config import ModelFacts
from minisgl.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from minisgl.kernel.quant import BLOCKS
from minisgl.layers.rotary import rope_type
from minisgl.params import SamplingParams
from minisgl.utils.gguf_header import read_gguf_header
from minisgl.utils.hf import is_gguf, read_json
from minisgl.utils.torch_utils import DTYPES, parse_dtype

from .config import ModelConfig, token_ids
from .fields import bad_field, shown

__all__ = ["ModelInfo", "load_model_config", "load_model_info"]

_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ModelInfo:
    """A model's config with what the files around it add."""

    config: ModelConfig
    dtype: torch.dtype
    """The type the weights were published in; bfloat16 for quantized files or if none is named."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """`generation_config.json` without nulls, or empty."""
    eos_token_ids: frozenset[int] = frozenset()
    """The EOS ids of the config and of the generation config together."""

    quantized: bool = False
    """Some matrix is stored in a block format of `kernel/quant.py`."""

    def facts(self) -> ModelFacts:
        """What `minisgl.config.resolve` needs of it."""
        rotary = self.config.rotary_config
        return ModelFacts(
            self.dtype,
            rotary.max_context,
            rope_type(rotary.scaling),
            self.config.head_dim,
            self.config.num_qo_heads,
            self.config.num_kv_heads,
            num_experts=self.config.num_experts if self.config.is_moe else 0,
            quantized=self.quantized,
        )


def load_model_config(model_path: str) -> ModelConfig:
    """The config of a folder with `config.json` or of a GGUF file."""
    return ModelConfig.from_hf(SimpleNamespace(**_read_config(model_path)))


def load_model_info(model_path: str) -> ModelInfo:
    """Everything the files say that isn't weights or tokenizer, checked.

    Raises `UnsupportedModelError` for a config that can't be served, and `CheckpointError` for
    files that can't be read or generation defaults that no request could ask for.
    """
    raw = _read_config(model_path)
    config = ModelConfig.from_hf(SimpleNamespace(**raw))
    file = Path(model_path) / "generation_config.json"
    defaults = _generation_defaults(file) if file.is_file() else {}
    eos = token_ids(defaults.get("eos_token_id"), f"{file}: eos_token_id")
    return ModelInfo(
        config=config,
        dtype=_gguf_dtype(model_path) if is_gguf(model_path) else _stored_dtype(raw),
        generation_defaults=defaults,
        eos_token_ids=frozenset(config.eos_token_ids + eos),
        quantized=is_gguf(model_path) and _has_blocks(model_path),
    )


def _generation_defaults(file: Path) -> dict[str, Any]:
    """A `generation_config.json` without its nulls, once a request could be made with it."""
    defaults = {name: value for name, value in read_json(file).items() if value is not None}
    top_k = defaults.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        defaults["top_k"] = int(top_k)
    sample = defaults.get("do_sample", True)
    if not isinstance(sample, bool):
        raise CheckpointError(f"{file}: do_sample = {shown(sample)} must be true or false")
    try:
        SamplingParams().resolve_defaults(defaults)
    except InvalidRequestError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return defaults


def _stored_dtype(raw: dict[str, Any]) -> torch.dtype:
    """`dtype` (transformers 5) or `torch_dtype` (4.x) of a config; bfloat16 if neither says."""
    name = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(name)
    if value is None or value == "auto":
        return torch.bfloat16
    try:
        if isinstance(value, str):
            return parse_dtype(value.removeprefix("torch."))
    except ValueError:
        pass
    raise bad_field(name, value, f'"auto", null, or one of {", ".join(DTYPES)}')


def _gguf_dtype(path: str) -> torch.dtype:
    """The type that most bytes of the matrices are stored in; bfloat16 if they are quantized."""
    nbytes: Counter[torch.dtype] = Counter()
    for info in read_gguf_header(path).tensors:
        if len(info.shape) > 1:
            nbytes[_GGUF_DTYPES.get(info.type_name, torch.bfloat16)] += info.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else torch.bfloat16


def _has_blocks(path: str) -> bool:
    return any(
        len(info.shape) == 2 and info.type_name in BLOCKS for info in read_gguf_header(path).tensors
    )


def _read_config(model_path: str) -> dict[str, Any]:
    if is_gguf(model_path):
        from .gguf import load_gguf_config

        return load_gguf_config(model_path)
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelNotFoundError(f"{model_path} has no config.json and is not a GGUF file")
    return read_json(file)
