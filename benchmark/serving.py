"""What serving costs: `minisgl bench serve` at unlimited rate against offline `LLM.generate`.

    python benchmark/serving.py [--model smollm2] [--requests 200] [--input 64] [--output 64]
        [--rounds 3] [--tokenizer-workers 0]

Both run the same requests (token ids, greedy, EOS ignored) with empty prefix caches, in turn, so
that they meet the same machine; the client runs on it too, and its share of a core is stated. The
last line is JSON; its figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from minisgl import LLM, SamplingParams
from minisgl.benchmark.load import measured_calls
from minisgl.benchmark.serve_options import ServeOptions


def offline_tok_s(llm: LLM, options: ServeOptions) -> float:
    """Output tokens a second of `LLM.generate`."""
    bodies = [json.loads(call.body) for call in measured_calls(options, "model")]
    params = [
        SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True)
        for body in bodies
    ]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.token_ids) for output in outputs) / seconds


def served(url: str, options: ServeOptions) -> dict[str, Any]:
    """The results of `minisgl bench serve`, in a process of its own."""
    command = [sys.executable, "-m", "minisgl", "bench", "serve", "--json", "--url", url]
    command += ["--num-requests", str(options.num_requests), "--seed", str(options.seed)]
    command += ["--input-len", str(options.input_len), "--output-len", options.output_len]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description="Serving against offline.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--input", default="64")
    parser.add_argument("--output", default="64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer-workers", type=int, default=0)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "minisgl", "serve", "--model", arguments.model, "--port", "0"]
    command += ["--tokenizer-workers", str(arguments.tokenizer_workers), "--log-level", "error"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = server.stdout.readline()
    if "ready at" not in line:
        sys.exit("the server did not start")
    url = line.split("ready at ")[1].split(";")[0]
    offline, online = [], []
    try:
        with LLM(arguments.model) as llm:
            for seed in range(arguments.rounds):
                options = ServeOptions(
                    num_requests=arguments.requests,
                    input_len=arguments.input,
                    output_len=arguments.output,
                    seed=seed,
                )
                offline.append(offline_tok_s(llm, options))
                online.append(served(url, options))
                share = online[-1]["output_tok_s"] / offline[-1]
                print(
                    f"offline {offline[-1]:.1f} tok/s, served {online[-1]['output_tok_s']:.1f} "
                    f"({share:.1%}), client {online[-1]['client']['cpu_share']:.0%} of a core",
                    flush=True,
                )
    finally:
        server.terminate()
        server.wait()
    shares = [row["output_tok_s"] / base for base, row in zip(offline, online, strict=True)]
    figures = {
        "offline_tok_s": statistics.median(offline),
        "served_tok_s": statistics.median(row["output_tok_s"] for row in online),
        "share": statistics.median(shares),
        "client_cpu_share": statistics.median(row["client"]["cpu_share"] for row in online),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
