"""The same jobs on `transformers`' `generate`, for comparison."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from minisgl.utils.hf import resolve_model_path

from .workloads import Job

__all__ = ["TransformersRunner"]


class TransformersRunner:
    """Static batches: prompts padded on the left, all rows run to the longest output."""

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        path = Path(resolve_model_path(model))
        options: dict[str, Any] = {"dtype": dtype}
        if path.is_file():
            options["gguf_file"] = path.name
            path = path.parent
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), **options)
        self._model = loaded.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> float:
        """Seconds for all jobs in one call of `generate`."""
        width = max(len(job.prompt) for job in jobs)
        length = max(job.output_len for job in jobs)
        ids = torch.zeros((len(jobs), width), dtype=torch.int64, device=self._device)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        start = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start
