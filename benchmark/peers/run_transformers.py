"""The workloads on `transformers`: static batches, padded on the left, run to the longest output.

pip install transformers torch accelerate gguf
python run_transformers.py --model MODEL.gguf --dtype bfloat16
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from peer import Job, arguments, report


class Transformers:
    """A model of `AutoModelForCausalLM`."""

    version = transformers.__version__

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        path, more = Path(options.model), {}
        if path.is_file():
            path, more = path.parent, {"gguf_file": path.name}
        dtype = getattr(torch, options.dtype)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **more)
        self._model = model.eval()
        self.weights = options.dtype

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> list[int]:
        """One call of `generate`; what a row computes beyond its output is cut."""
        width, length = max(len(job.prompt) for job in jobs), max(job.output_len for job in jobs)
        ids = torch.zeros((len(jobs), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        found = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        return [
            len(row[width : width + job.output_len]) for row, job in zip(found, jobs, strict=True)
        ]

    def close(self) -> None:
        """Nothing to end."""


def main() -> None:
    """Measure."""
    parser = arguments("a folder, or a .gguf file, which is dequantized")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    report("transformers", options, lambda: Transformers(options))


if __name__ == "__main__":
    main()
