"""Tensor parallelism's kernels on a single GPU: two ranks share it, or one has a group of its own.

Two ranks take turns on the device, a few milliseconds each, and wait for each other in between:
that is slow, and says nothing of speed. tests/multigpu has a GPU for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.distributed import make_store
from tests.gpu.small_models import MODELS, VOCAB, save_small
from tests.helpers import random_prompts

pytestmark = pytest.mark.gpu  # needs a CUDA device

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = random_prompts([5, 40, 17], VOCAB, seed=8)
NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 64,
    "max_model_len": 128,
    "max_running_requests": 4,
    "max_prefill_length": 64,
}


def run_processes(does: str, size: int, runs: list[dict[str, Any]]) -> Any:
    """What rank 0 found."""
    store = make_store(size)
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank_process", json.dumps(spec)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(size)
        for spec in [{"does": does, "rank": rank, "size": size, "port": store.port, "runs": runs}]
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size
    return json.loads(outputs[0].decode().splitlines()[-1])


def by_one_process(run: dict[str, Any]) -> list[list[int]]:
    options = {name: value for name, value in run["options"].items() if name != "ep"}
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    with LLM(run["model"], device="cuda", **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def make_run(model: str, **options: Any) -> dict[str, Any]:
    settings = OPTIONS | options
    return {"model": model, "options": settings, "prompts": PROMPTS, "max_tokens": NUM_TOKENS}


def test_two_ranks_generate_what_one_process_does(tmp_path: Path) -> None:
    models = {name: save_small(name, tmp_path / name) for name in MODELS}
    runs = [make_run(folder) for folder in models.values()]
    runs.append(make_run(models["qwen3-30b-a3b"], ep=True))
    runs.append(make_run(models["qwen3-0.6b"], cuda_graph_max_bs=0, overlap="off"))
    found = run_processes("ranks", 2, runs)
    for run, ids in zip(runs, found, strict=True):
        assert ids == by_one_process(run), run["model"]


def test_collectives_of_nccl_in_graphs(tmp_path: Path) -> None:
    run = make_run(save_small("qwen3-0.6b", tmp_path))
    answer = run_processes("alone", 1, [run])
    assert answer["found"] == [by_one_process(run)]
    assert all(0 < seconds < 1 for _, *both in answer["timings"] for seconds in both)


def test_who_waits_for_a_lost_rank_is_let_go() -> None:
    assert run_processes("lose", 2, []) < 5
