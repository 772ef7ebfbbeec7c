"""What a configuration does to the model: its next-token distributions against float32's.

    python benchmark/quality.py [--model smollm2] [--tokens 2048] [--window 256] [--text FILE ...]
        'bf16=--dtype bfloat16 --quantization none' int8='--quantization int8' gguf= \
        'decode=--max-prefill-length 1 --max-running-requests 1'

Each NAME=FLAGS is a configuration, with the flags of `minisgl generate`. All read the same text
(by default this repository's docs/architecture.md and docs/server.md) in windows of their own, each
token given its true predecessors. The reference is the model in float32 by the reference kernels;
of a quantized file that is its dequantized weights, so that the file's own loss is in no figure.

    mean KL, p99 KL   of the reference's distribution from the configuration's, in nats a token
    top-1             share of tokens for which both have the same most likely one
    perplexity        of the text

A prompt is computed many tokens at a time. With --max-prefill-length 1 --max-running-requests 1
each step computes one, by the kernels that decoding takes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from minisgl import LLM, SamplingParams
from minisgl.cli.flags import Parser, add_flags, from_flags
from minisgl.config import EngineConfig
from minisgl.engine import engine
from minisgl.engine.prompt_logprobs import PromptLogprobs
from minisgl.errors import ConfigError, MinisglError

REFERENCE = "--dtype float32 --quantization none --kernels reference"
TEXTS = ("docs/architecture.md", "docs/server.md")


class Quality(NamedTuple):
    """Of one configuration, over all scored tokens."""

    mean_kl: float
    p99_kl: float
    top1: float
    perplexity: float


def parse_configuration(text: str) -> tuple[str, EngineConfig]:
    """NAME=FLAGS as the name and the engine's configuration."""
    name, sign, flags = text.partition("=")
    if not (name and sign):
        raise ConfigError(f"{text!r} must be NAME=FLAGS, as in int8='--quantization int8'")
    parser = Parser(prog=f"quality.py {name}=", add_help=False)
    add_flags(parser, EngineConfig, "engine")
    return name, from_flags(EngineConfig, parser.parse_args(shlex.split(flags)))


def windows_of(ids: list[int], tokens: int, window: int) -> list[list[int]]:
    """The first `tokens` ids, cut into pieces of `window`; a rest of one token scores nothing."""
    if len(ids) < tokens:
        raise ConfigError(f"--tokens {tokens}: the text has {len(ids)}; give more by --text")
    pieces = [ids[i : min(i + window, tokens)] for i in range(0, tokens, window)]
    return [piece for piece in pieces if len(piece) > 1]


def next_token_logprobs(llm: LLM, windows: list[list[int]]) -> torch.Tensor:
    """Log-probabilities `[N, V]` float32 after each token of each window but its last.

    They are taken where the engine hands over the logits that prompt logprobs are made of.
    """
    pieces: list[torch.Tensor] = []

    class Sink(PromptLogprobs):
        def collect(self, offset: int, logits: torch.Tensor) -> None:
            pieces.append(torch.log_softmax(logits.float(), dim=-1).cpu())
            super().collect(offset, logits)

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with mock.patch.object(engine, "PromptLogprobs", Sink):
        for window in windows:  # one at a time: chunks come in the order of the tokens
            llm.generate(window, params, use_tqdm=False)
    found = torch.cat(pieces)
    expected = sum(len(window) - 1 for window in windows)
    if found.shape[0] != expected:
        raise RuntimeError(f"the engine gave {found.shape[0]} distributions instead of {expected}")
    return found


def compare(reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> Quality:
    """Both are log-probabilities `[N, V]`; `targets [N]` int64 are the tokens that came."""
    kl = torch.stack([_divergence(p, q) for p, q in zip(reference, other, strict=True)])
    same = reference.argmax(dim=-1) == other.argmax(dim=-1)
    loss = -other.gather(1, targets.unsqueeze(1)).double().mean()
    return Quality(
        kl.mean().item(), kl.quantile(0.99).item(), same.double().mean().item(), loss.exp().item()
    )


def _divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL of two rows of log-probabilities `[V]`, summed in float64: bfloat16's is about 1e-4."""
    wanted = reference.double()
    return (wanted.exp() * (wanted - other.double())).sum()


def measure(
    model: str, configurations: dict[str, EngineConfig], text: str, options: argparse.Namespace
) -> dict[str, Quality]:
    """The figures of the reference and of each configuration, one model in memory at a time."""
    results: dict[str, Quality] = {}
    reference, windows, targets = None, [], torch.empty(0)
    for name, config in configurations.items():
        with LLM(model, **vars(config)) as llm:
            if reference is None:
                if llm.tokenizer is None:
                    raise ConfigError(f"{model} has no tokenizer, so text can't be read")
                windows = windows_of(llm.tokenizer.encode(text), options.tokens, options.window)
                targets = torch.tensor([token for window in windows for token in window[1:]])
            found = next_token_logprobs(llm, windows)
        reference = found if reference is None else reference
        results[name] = quality = compare(reference, found, targets)
        print(
            f"{name:16} mean KL {quality.mean_kl:9.2e}  p99 KL {quality.p99_kl:9.2e}  "
            f"top-1 {quality.top1:7.2%}  perplexity {quality.perplexity:.3f}",
            flush=True,
        )
    return results


def main() -> None:
    """Read the text with each configuration and print a line for it."""
    parser = argparse.ArgumentParser(description="KL and perplexity against float32.")
    parser.add_argument("configurations", nargs="+", metavar="NAME=FLAGS")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, action="append", help="a file, in place of the docs")
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        help="of the text; each takes 8 bytes a vocabulary entry",
    )
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    if options.window < 2 or options.tokens < 2:
        parser.error("--window and --tokens must be at least 2")
    root = Path(__file__).resolve().parents[1]
    paths = options.text or [root / name for name in TEXTS]
    try:
        given = [f"float32={REFERENCE}", *options.configurations]
        configurations = dict(map(parse_configuration, given))
        if len(configurations) != len(given):
            raise ConfigError("two configurations have one name (the reference's is float32)")
        text = "\n".join(path.read_text("utf-8") for path in paths)
        results = measure(options.model, configurations, text, options)
    except (MinisglError, OSError) as error:
        sys.exit(f"quality.py: {error}")
    figures: dict[str, object] = {
        key: getattr(options, key) for key in ("model", "tokens", "window")
    }
    figures["configurations"] = {name: quality._asdict() for name, quality in results.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
