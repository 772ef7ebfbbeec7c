"""Other people's benchmark clients and our own against one running server, in one table.

    minisgl serve --model smollm2 &
    python benchmark/external.py --model smollm2 [--url URL] [--requests 64] [--concurrency 8] \
        [--input 64] [--output 32] [--guidellm BIN] [--aiperf BIN] [--vllm BIN] [--sglang PYTHON]

Each client is named by its program and left out if it isn't. All draw their own random prompts of
the same lengths, keep the same number of requests in flight, and are unmodified. How they were
installed without their engines, each in a virtual environment of its own (November 2026):

    guidellm 0.8.1   pip install guidellm
    aiperf 0.13.0    pip install aiperf
    vllm 0.33.0      pip install --no-deps vllm, then what `vllm bench serve --help` misses: torch
                     and transformers, cbor2, oss-harmony, cloudpickle, pybase64, cachetools,
                     py-cpuinfo, partial-json-parser, xgrammar, apache-tvm-ffi, llguidance,
                     watchfiles, orjson, einops
    sglang 0.5.23    pip install --no-deps sglang, then torch, torchvision, transformers, orjson,
                     pybase64, apache-tvm-ffi, sentencepiece, compressed-tensors, ipython, datasets

No model hub is needed: the tokenizer is taken from the model and saved for them. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.tokenizer import Tokenizer
from minisgl.utils.hf import resolve_model_path


class Run(NamedTuple):
    """What all clients are asked for."""

    url: str
    model: str
    tokenizer: str
    folder: Path
    requests: int
    concurrency: int
    input: int
    output: int


class Figures(NamedTuple):
    """Medians, but for the throughput."""

    output_tok_s: float
    ttft_ms: float
    tpot_ms: float


def ours(program: str, run: Run) -> Figures:
    """`minisgl bench serve`; vocabulary and seed differ from all others, so nothing is cached."""
    lengths = ["--input-len", str(run.input), "--output-len", str(run.output)]
    load = ["--num-requests", str(run.requests), "--concurrency", str(run.concurrency)]
    command = [program, "-m", "minisgl", "bench", "serve", "--url", run.url, "--json"]
    found = json.loads(_output([*command, *lengths, *load]).splitlines()[-1])
    return Figures(found["output_tok_s"], found["ttft_ms"]["p50"], found["tpot_ms"]["p50"])


def vllm(program: str, run: Run) -> Figures:
    """`vllm bench serve` on /v1/completions."""
    _output(
        [program, "bench", "serve", "--backend", "openai", "--base-url", run.url]
        + ["--endpoint", "/v1/completions", "--model", run.model, "--tokenizer", run.tokenizer]
        + ["--dataset-name", "random", "--random-input-len", str(run.input)]
        + ["--random-output-len", str(run.output), "--num-prompts", str(run.requests)]
        + ["--max-concurrency", str(run.concurrency), "--ignore-eos", "--temperature", "0"]
        + ["--save-result", "--result-dir", str(run.folder), "--result-filename", "vllm.json"]
    )
    return _vllm_like(json.loads((run.folder / "vllm.json").read_text("utf-8")))


def sglang(program: str, run: Run) -> Figures:
    """`sglang.bench_serving` on SGLang's own /generate."""
    file = run.folder / "sglang.jsonl"
    _output(
        [program, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", run.url]
        + ["--model", run.model, "--tokenizer", run.tokenizer, "--dataset-name", "random-ids"]
        + ["--random-input-len", str(run.input), "--random-output-len", str(run.output)]
        + ["--random-range-ratio", "1.0", "--num-prompts", str(run.requests)]
        + ["--max-concurrency", str(run.concurrency), "--output-file", str(file)]
    )
    return _vllm_like(json.loads(file.read_text("utf-8").splitlines()[-1]))


def _vllm_like(found: dict[str, Any]) -> Figures:
    return Figures(found["output_throughput"], found["median_ttft_ms"], found["median_tpot_ms"])


def aiperf(program: str, run: Run) -> Figures:
    """`aiperf profile` on /v1/completions."""
    _output(
        [program, "profile", "--model", run.model, "--url", run.url, "--streaming", "--ui", "none"]
        + ["--endpoint-type", "completions", "--tokenizer", run.tokenizer]
        + ["--isl", str(run.input), "--isl-stddev", "0"]
        + ["--osl", str(run.output), "--osl-stddev", "0", "--request-count", str(run.requests)]
        + ["--concurrency", str(run.concurrency), "--extra-inputs", "ignore_eos:true"]
        + ["--extra-inputs", "temperature:0", "--no-gpu-telemetry", "--random-seed", "7"]
        + ["--use-server-token-count", "--artifact-dir", str(run.folder / "aiperf")]
    )
    found = json.loads((run.folder / "aiperf/profile_export_aiperf.json").read_text("utf-8"))
    return Figures(
        found["output_token_throughput"]["avg"],
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["p50"],
    )


def guidellm(program: str, run: Run) -> Figures:
    """`guidellm run` on /v1/completions."""
    file = run.folder / "guidellm.json"
    backend = f"kind=openai_http,target={run.url},model={run.model}"
    _output(
        [program, "run", "--backend", f"{backend},request_format=/v1/completions"]
        + ["--tokenizer", f"kind=huggingface_auto,model={run.tokenizer}"]
        + ["--profile", f"kind=concurrent,streams={run.concurrency}"]
        + ["--constraint", f"kind=max_requests,count={run.requests}"]
        + ["--data", f"kind=synthetic_text,prompt_tokens={run.input},output_tokens={run.output}"]
        + ["--output", f"kind=json,path={file}", "--disable-console-interactive"],
        HF_HUB_OFFLINE="1",
    )
    metrics = json.loads(file.read_text("utf-8"))["benchmarks"][0]["metrics"]
    return Figures(
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["time_to_first_token_ms"]["successful"]["median"],
        metrics["inter_token_latency_ms"]["successful"]["median"],
    )


def _output(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


CLIENTS: dict[str, Callable[[str, Run], Figures]] = {
    "vllm": vllm,
    "sglang": sglang,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def main() -> None:
    """Run all that were named."""
    parser = argparse.ArgumentParser(description="Other benchmark clients against a server.")
    parser.add_argument("--url", default="http://127.0.0.1:1919")
    parser.add_argument("--model", default="smollm2", help="as served, and to find the tokenizer")
    for name, default in (("requests", 64), ("concurrency", 8), ("input", 64), ("output", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in CLIENTS:
        parser.add_argument(f"--{name}", metavar="PROGRAM")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(Path(folder, "tokenizer"))
        Tokenizer.load(resolve_model_path(arguments.model)).save(tokenizer)
        run = Run(
            arguments.url,
            arguments.model,
            tokenizer,
            Path(folder),
            arguments.requests,
            arguments.concurrency,
            arguments.input,
            arguments.output,
        )
        programs = {name: getattr(arguments, name) for name in CLIENTS}
        figures = {"minisgl": ours(sys.executable, run)}
        for name, program in programs.items():
            if program is not None:
                figures[name] = CLIENTS[name](program, run)
    print(f"{'client':<10}{'output tok/s':>14}{'TTFT p50 ms':>14}{'TPOT p50 ms':>14}")
    for name, row in figures.items():
        print(f"{name:<10}{row.output_tok_s:>14.1f}{row.ttft_ms:>14.1f}{row.tpot_ms:>14.2f}")
    print(json.dumps({name: row._asdict() for name, row in figures.items()}))


if __name__ == "__main__":
    main()
