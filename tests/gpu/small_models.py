"""Small random checkpoints, and what a run of them shows besides its outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl import LLM, RequestOutput
from minisgl.core import Batch, PageWrites, PendingStep, Req
from minisgl.engine import Engine
from tests.model.invariance import assert_same_logprobs
from tools.make_checkpoint import make_checkpoint

VOCAB = 300
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b-instruct": {},
    "mistral-7b-v0.1": {"sliding_window": 12},
    "qwen2.5-0.5b-instruct": {},
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""One of each architecture, by the file of its published config; only the last isn't dense."""


def published_config(name: str) -> dict[str, Any]:
    """The `config.json` of a published model."""
    path = Path(__file__).parents[1] / "configs" / f"{name}.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return config


def save_small(
    name: str, folder: Path, *, dtype: str = "float32", scale: float = 0.3, **changes: Any
) -> str:
    """Save one of `MODELS`; the weights' usual `scale` is so large that logits are well apart."""
    config = published_config(name) | SMALL | MODELS[name] | changes
    return str(make_checkpoint(config, folder, dtype=dtype, scale=scale))


class Steps(NamedTuple):
    """Forwards so far: replayed as a CUDA graph, or launched kernel by kernel."""

    replayed: int
    launched: int


def steps(llm: LLM) -> Steps:
    """What the forward by Triton kernels counted."""
    from minisgl.engine.cuda_forward import CudaForward  # needs Triton

    forward = llm.engine._forward
    assert isinstance(forward, CudaForward)
    return Steps(forward.num_replayed, forward.num_launched)


class LogitsRecorder:
    """An executor that keeps the logits behind each step of some prompts' requests.

    They are copies on the device, queued like everything else: nothing waits.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        self._engine = engine
        self._wanted = {tuple(prompt) for prompt in prompts}
        self.rows: dict[tuple[tuple[int, ...], int], list[torch.Tensor]] = {}
        """By prompt and number of tokens computed: logits `[V]` of the last of them, once for
        each step that ended there."""

    def attach(self, req: Req) -> None:
        self._engine.attach(req)

    def set_pages(self, writes: PageWrites) -> None:
        self._engine.set_pages(writes)

    def launch(self, batch: Batch) -> PendingStep:
        step = self._engine.launch(batch)
        logits = self._engine._forward.logits(np.arange(batch.size))
        for i, (req, length) in enumerate(zip(batch.reqs, batch.device_lens.tolist(), strict=True)):
            prompt = tuple(req.token_ids[: req.prompt_len])
            if prompt in self._wanted:
                self.rows.setdefault((prompt, length), []).append(logits[i].clone())
        return step


def record(llm: LLM, prompts: Sequence[Sequence[int]]) -> LogitsRecorder:
    """Keep the logits of these prompts from now on; the LLM must be idle."""
    assert not llm.scheduler.has_work
    recorder = LogitsRecorder(llm.engine, prompts)
    llm.scheduler._executor = recorder
    return recorder


def assert_same_outputs(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Equal tokens and ends, logprobs within the tolerance for sums in another order."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
        pairs = list(zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True))
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert x.token_ids == y.token_ids, f"prompt {i}, choice {x.index}"
            assert x.finish_reason == y.finish_reason
            assert (x.logprobs is None) == (y.logprobs is None)
            pairs += zip(x.logprobs or (), y.logprobs or (), strict=True)
        for mine, other in pairs:
            assert (mine is None) == (other is None)  # a prompt's first token has no logprob
            if mine is not None and other is not None:
                assert_same_logprobs(mine, other)
