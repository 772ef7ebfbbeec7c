"""Writes the token ids of the offline workloads to a file that the peers' scripts read.

    .venv/bin/python benchmark/peers/workloads.py [--model smollm2] > workloads.json

Runs in minisgl's environment; the peers need not have minisgl in theirs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from minisgl.benchmark.workloads import WORKLOADS, make_workload
from minisgl.models import load_model_info
from minisgl.utils.hf import resolve_model_path


def main() -> None:
    """Print one JSON object: the model's path and, by workload, prompts and output lengths."""
    parser = argparse.ArgumentParser(description="Token ids of the offline workloads, as JSON.")
    parser.add_argument("--model", default="smollm2", help="folder, .gguf file, hub id, or smollm2")
    path = resolve_model_path(parser.parse_args().model)
    vocab_size = load_model_info(path).config.vocab_size
    jobs = {name: [asdict(job) for job in make_workload(name, vocab_size)] for name in WORKLOADS}
    print(json.dumps({"model": path, "vocab_size": vocab_size, "workloads": jobs}))


if __name__ == "__main__":
    main()
