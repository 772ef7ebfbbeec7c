"""`minisgl chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from minisgl.config import EngineConfig
from minisgl.params import SamplingParams

from .flags import add_flags, from_flags

__all__ = ["add_parser"]

_SKIP = ("n", "logprobs", "prompt_logprobs")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk to a model in the terminal",
        description="Talk to a model. /help lists the commands inside; Ctrl-C stops an answer.",
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument("--system", help="system message to begin with")
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, SamplingParams, "sampling", skip=_SKIP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Load the model and hand over to the terminal chat."""
    config, params = from_flags(EngineConfig, arguments), from_flags(SamplingParams, arguments)

    from minisgl.llm import LLM
    from minisgl.shell import Shell

    with LLM(arguments.model, **vars(config)) as llm:
        Shell(llm, params, system=arguments.system).run()
