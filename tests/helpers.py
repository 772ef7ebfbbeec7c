"""What several test files use: comparisons, tiny reference models, an engine's logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minisgl.config import EngineConfig
from minisgl.core import Batch, PageWrites, Req, SamplingParams
from minisgl.engine import Engine
from minisgl.kernel.cpu import has_native
from minisgl.models.checkpoint import load_model_info
from minisgl.resolve import resolve
from minisgl.utils import div_ceil
from minisgl.utils.hardware import Hardware

LOGIT_ATOL = 1e-4
"""Logits in float32 against transformers.

The same sums in another order: a few units in the last place (6e-8) of logits of up to 8, after
some tens of operations that each round again. Measured over all models: at most 1.1e-5.
"""
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    # Ten times the usual spread, so that the logits are well apart.
    "initializer_range": 0.2,
}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, atol: float, what: str = "") -> None:
    """Fail with the maximal and mean error when any element is further off than `atol`."""
    assert ours.shape == theirs.shape, f"{what} {tuple(ours.shape)} != {tuple(theirs.shape)}"
    assert ours.dtype == theirs.dtype, f"{what} {ours.dtype} != {theirs.dtype}"
    error = (ours.double() - theirs.double()).abs()
    worst = error.max().item() if error.numel() else 0.0
    # Not `worst > atol`: a NaN must fail.
    assert worst <= atol, f"{what} max error {worst:.3g}, mean {error.mean().item():.3g} > {atol}"


def tiny_hf_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random `transformers` model in float32; biases and norm weights are random too."""
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.2)
            elif "norm" in name:
                weight.normal_(1.0, 0.2)
    return model


def save(model: Any, folder: Path, **fields: Any) -> str:
    """Save a model and change fields of its `config.json`; a field set to `...` is removed."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}), "utf-8")
    return str(folder)


class Greedy(NamedTuple):
    """What `transformers` generates, and the smallest lead of a chosen token's logit."""

    token_ids: list[int]
    smallest_gap: float


def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> Greedy:
    """Greedy continuation of one prompt, the model's EOS ids respected."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2, dim=-1).values
    gap = (best[:, 0] - best[:, 1]).min().item()
    return Greedy(output.sequences[0, len(prompt) :].tolist(), gap)


def hf_logits(model: Any, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Logits `[len(positions), V]` of one whole forward."""
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), logits_to_keep=torch.tensor(positions))
    return output.logits[0]


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def make_engine(model_path: str, **config: Any) -> Engine:
    """An engine alone, without scheduler or tokenizer; takes `EngineConfig`'s fields.

    As for `LLM`, the native kernels compute unless `kernels="reference"`.
    """
    asked = EngineConfig(**config)
    hardware = Hardware.detect()
    if asked.kernels == "auto" and not hardware.has_cuda:
        hardware = replace(hardware, has_native=has_native())
    info = load_model_info(model_path)
    return Engine(model_path, info.config, resolve(asked, hardware, info.facts()))


class _Rows:
    """A `PromptLogitsSink` that keeps the logits of the rows it names."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self.pieces: list[torch.Tensor] = []

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        assert offset == sum(map(len, self.pieces))
        self.pieces.append(logits.clone())


def engine_logits(
    engine: Engine, token_ids: Sequence[int], positions: Sequence[int], chunk: int
) -> torch.Tensor:
    """Logits `[len(positions), V]` of a prompt run in chunks; `positions` ascend."""
    ids, size = list(token_ids), engine.config.page_size
    params = SamplingParams(temperature=0.0, max_tokens=1).resolve_defaults({})
    req = Req(uid=0, token_ids=ids, prompt_len=len(ids), params=params, max_len=len(ids) + 1)
    req.row, req.pages = 0, list(range(div_ceil(len(ids), size)))
    engine.attach(req)
    columns = list(range(len(req.pages)))
    engine.set_pages(PageWrites([req.row] * len(columns), columns, req.pages, fresh=req.pages))
    found: list[torch.Tensor] = []
    for start in range(0, len(ids), chunk):
        req.device_len = min(start + chunk, len(ids))
        batch = Batch([req])
        batch.prompt_logits = sink = _Rows(
            [p - start for p in positions if start <= p < req.device_len]
        )
        engine.launch(batch).result()
        req.cached_len = req.device_len
        found += sink.pieces
    return torch.cat(found)
