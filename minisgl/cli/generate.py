"""`minisgl generate`: answer one prompt, streamed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, InvalidRequestError
from minisgl.params import SamplingParams
from minisgl.utils.heap import collector_paused

from .flags import add_flags, from_flags

__all__ = ["add_parser"]

_SKIP = ("n", "logprobs", "prompt_logprobs")  # a stream of text shows one sequence and no numbers


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "generate",
        parents=[common],
        help="answer a prompt, streamed",
        description="Answer a prompt. The text goes to stdout, counts and tokens/s to stderr.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - or none reads stdin")
    parser.add_argument("--model", required=True, help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument("--file", type=Path, help="read the prompt from a file")
    parser.add_argument("--system", help="system message before the prompt")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it stands instead of putting it into the chat template",
    )
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, SamplingParams, "sampling", skip=_SKIP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Load the model, stream the answer, end with a line of counts and tokens/s."""
    config, params = from_flags(EngineConfig, arguments), from_flags(SamplingParams, arguments)
    if arguments.raw and arguments.system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out")
    text = _prompt(arguments)

    with collector_paused():
        from minisgl.llm import LLM

        start = time.perf_counter()
        loading = LLM(arguments.model, **vars(config))
    with loading as llm:
        loaded = time.perf_counter()
        prompt, chat = _encode(llm, text, arguments)
        first, count = loaded, 0
        for chunk in llm.stream(prompt, params, fill_context=chat):
            if count == 0:
                first = time.perf_counter()
            count += len(chunk.token_ids)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        end = time.perf_counter()
    sys.stdout.write("\n")
    prefill_s, decode_s = first - loaded, end - first
    decode = f"{(count - 1) / decode_s:.1f} tok/s" if count > 1 and decode_s > 0 else "-"
    print(
        f"[{len(prompt)} prompt + {count} output tokens | loaded in {loaded - start:.1f} s | "
        f"prefill {len(prompt) / prefill_s:.0f} tok/s | decode {decode}]",
        file=sys.stderr,
    )


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt not in (None, "-") and arguments.file is not None:
        raise ConfigError("give the prompt as an argument or with --file, not both")
    if arguments.file is not None:
        try:
            text = Path(arguments.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {arguments.file}: {error}") from error
    elif arguments.prompt in (None, "-"):
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin is not UTF-8 text: {error}") from error
    else:
        text = str(arguments.prompt)
    if not text:
        raise InvalidRequestError("the prompt is empty: give it as an argument, --file or stdin")
    return text


def _encode(llm: Any, text: str, arguments: argparse.Namespace) -> tuple[list[int], bool]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidRequestError(f"{arguments.model} has no tokenizer, so text can't be read")
    if arguments.raw or tokenizer.chat_template is None:
        if arguments.system is not None:
            raise ConfigError(f"--system: {arguments.model} has no chat template")
        return tokenizer.encode(text), False
    messages = [{"role": "user", "content": text}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return llm.encode_chat(messages), True
