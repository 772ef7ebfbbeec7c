"""`minisgl batch`: answer a file of requests."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import fields
from typing import Any, NoReturn

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.server.config import ServerConfig

from .flags import add_flags, from_flags

__all__ = ["add_parser"]

MAX_CONCURRENCY = 1 << 16

_OPTIONS = (
    "served_model_name",
    "tokenizer_workers",
    "max_body_size",
    "max_n",
    "template_timeout",
    "template_kwargs",
    "reasoning_parser",
)
"""What a server's options say about requests, and not about connections or logs."""

_DESCRIPTION = """\
Answer an OpenAI batch file: a line of the input is
{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
(or /v1/completions), and means what that request means to `minisgl serve`. Its line of the output
has the custom_id and the response (status_code, body), or an error (code, message) if it is no
request; one that fails does not stop the others. Lines are written as they finish, in any order.
The same command goes on with a batch that was interrupted: lines that succeeded are kept, failed
ones are tried again and replaced. Exit codes: 0, all lines succeeded; 1, some failed, or the
engine died; 2, it can't start; 130, interrupted."""


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "batch",
        parents=[common],
        help="answer a file of requests, as OpenAI's batch API",
        description=_DESCRIPTION,
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file, hub id, or smollm2")
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="JSON lines of requests; - reads stdin"
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSON lines of answers; may exist"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="INT",
        help="lines to work on at a time (default: 2 * --max-running-requests)",
    )
    others = [field.name for field in fields(ServerConfig) if field.name not in _OPTIONS]
    add_flags(parser, ServerConfig, "requests", skip=others)
    add_flags(parser, EngineConfig, "engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Answer the batch, and end the process."""
    config, options = from_flags(EngineConfig, arguments), from_flags(ServerConfig, arguments)
    concurrency = arguments.concurrency
    if concurrency is not None and not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency = {concurrency} must be from 1 to {MAX_CONCURRENCY}")

    from minisgl.server.batch import BatchJob, run_batch

    job = BatchJob(arguments.input, arguments.output, concurrency)
    code = run_batch(arguments.model, config, options, job)
    logging.shutdown()
    sys.stdout.flush()
    # All is closed and said. A thread may still hang on stdin, and keep an ordinary end waiting.
    os._exit(code)
