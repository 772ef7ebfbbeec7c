"""`minisgl chat`: talk to a model in the terminal, loaded here or served elsewhere."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.params import SamplingParams
from minisgl.server.config import API_KEY_VARIABLE

from .flags import add_flags, from_flags

if TYPE_CHECKING:
    from minisgl.shell import Backend

__all__ = ["add_parser"]

_SKIP = ("n", "logprobs", "prompt_logprobs")


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        help="talk to a model in the terminal",
        description="Talk to a model, loaded here (--model) or served by an OpenAI-compatible "
        "server (--url). /help lists the commands inside; Ctrl-C stops an answer.",
    )
    parser.add_argument(
        "--model",
        help="folder, .gguf file, hub id, or smollm2; with --url, the server's name for it "
        "(default: the first that the server lists)",
    )
    parser.add_argument("--url", help="address of a running server, as http://127.0.0.1:1919")
    parser.add_argument(
        "--api-key", help="key for the server at --url (default: MINISGL_API_KEY, else none)"
    )
    parser.add_argument("--system", help="system message to begin with")
    add_flags(parser, EngineConfig, "engine")
    add_flags(parser, SamplingParams, "sampling", skip=_SKIP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Load the model, or find the server, and hand over to the terminal chat."""
    config, params = from_flags(EngineConfig, arguments), from_flags(SamplingParams, arguments)
    open_backend = _engine if arguments.url is None else _server

    from minisgl.shell import Shell

    with closing(open_backend(arguments, config)) as backend:
        Shell(backend, params, system=arguments.system).run()


def _engine(arguments: argparse.Namespace, config: EngineConfig) -> Backend:
    if arguments.model is None:
        raise ConfigError("give --model to load one here, or --url of a running server")
    if arguments.api_key is not None:
        raise ConfigError("--api-key is for a server: give its --url too, or leave the key out")

    from minisgl.server.async_engine import AsyncEngine
    from minisgl.shell.engine_backend import EngineBackend

    return EngineBackend(AsyncEngine(arguments.model, **vars(config)))


def _server(arguments: argparse.Namespace, config: EngineConfig) -> Backend:
    for item in fields(EngineConfig):
        value = getattr(config, item.name)
        if value != item.default:
            raise ConfigError(
                f"--{item.name.replace('_', '-')} = {value}: the server at --url has its own "
                "engine; give this flag to `minisgl serve`"
            )

    from minisgl.shell.url_backend import UrlBackend

    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE)
    return UrlBackend(arguments.url, arguments.model, key)
