"""`minisgl serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from typing import Any, NoReturn

from minisgl.config import EngineConfig
from minisgl.errors import EngineDeadError
from minisgl.server.config import API_KEY_VARIABLE, ServerConfig
from minisgl.utils.logger import configure_logging

from .flags import add_flags, from_flags

__all__ = ["LOG_LEVEL", "add_parser"]

LOG_LEVEL = "info"
"""A server says what it does."""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "serve",
        parents=[common],
        help="serve a model over HTTP, as OpenAI's API",
        description="Serve a model over HTTP. SIGTERM or Ctrl-C ends it when live requests have "
        "finished. /docs on the server describes its API. With --node-rank 1 and more it serves "
        "nothing, needs no server flags, and holds ranks for node 0 until that closes.",
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file, hub id, or smollm2")
    add_flags(parser, ServerConfig, "server")
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serve until told to end, and end the process."""
    config, options = from_flags(EngineConfig, arguments), from_flags(ServerConfig, arguments)
    if options.api_key is None:
        options = replace(options, api_key=os.environ.get(API_KEY_VARIABLE) or None)
    configure_logging(arguments.log_level, options.log_format)

    if config.node_rank:
        code = _hold_ranks(arguments.model, config)
    else:
        from minisgl.server.serve import serve

        code = serve(arguments.model, config, options)
    logging.shutdown()
    sys.stdout.flush()
    # All is closed and said. The interpreter's own end would take torch another second.
    os._exit(code)


def _hold_ranks(model: str, config: EngineConfig) -> int:
    """On a node other than node 0; returns the exit code."""
    from minisgl.scheduler.other_node import run_node

    try:
        run_node(model, config)
    except EngineDeadError as error:
        print(f"minisgl serve: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
