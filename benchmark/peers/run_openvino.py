"""The workloads on `openvino-genai`, by its continuous batching with prefix caching.

pip install openvino-genai
python run_openvino.py --model MODEL.gguf    (or a folder with an exported OpenVINO model)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from peer import Job, arguments, report


class OpenVino:
    """A `ContinuousBatchingPipeline`."""

    version = openvino_genai.get_version()

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GiB
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        self.weights = Path(options.model).name

    def run(self, jobs: list[Job]) -> list[int]:
        """One call of `generate`."""
        prompts = [openvino.Tensor(np.array([job.prompt], dtype=np.int64)) for job in jobs]
        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=job.output_len, ignore_eos=True, do_sample=False
            )
            for job in jobs
        ]
        found = self._pipe.generate(prompts, configs)
        return [len(result.m_generation_ids[0]) for result in found]

    def close(self) -> None:
        """Nothing to end."""


def main() -> None:
    """Measure."""
    options = arguments("a .gguf file, or a folder with an OpenVINO model").parse_args()
    report("openvino-genai", options, lambda: OpenVino(options))


if __name__ == "__main__":
    main()
