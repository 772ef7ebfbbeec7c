"""Parse the command line, run the command, turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from minisgl import __version__
from minisgl.errors import MinisglError
from minisgl.utils.logger import configure_logging

from .flags import Parser

__all__ = ["main"]

_COMMANDS = ("serve", "chat", "generate", "batch", "bench", "inspect")


def build_parser(names: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands; the module of each, of its name, adds its own."""
    parser = Parser(
        prog="minisgl",
        description="A compact LLM inference engine.",
        epilog="Flags without a command serve: minisgl --model M is minisgl serve --model M.",
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    commands = parser.add_subparsers(
        metavar="COMMAND", required=True, dest="command", parser_class=Parser
    )
    for name in names:
        command = import_module(f"minisgl.cli.{name}")
        command.add_parser(commands, _common_flags(getattr(command, "LOG_LEVEL", "warning")))
    return parser


def _common_flags(log_level: str) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show stack traces of errors")
    common.add_argument(
        "--log-level",
        default=log_level,
        choices=("debug", "info", "warning", "error"),
        help="what to log on stderr",
    )
    return common


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (a fault of ours), 2 (a user's), 130.

    Flags without a command, as in `minisgl --model M`, serve.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0].startswith("--") and given[0] not in ("--help", "--version"):
        named = [name for name in _COMMANDS if name in given]
        if named:
            _say(f"minisgl: error: flags go after the command: minisgl {named[0]} {given[0]} ...")
            return 2
        given.insert(0, "serve")
    # The others' modules are not worth waiting for, unless all are to be listed.
    names = given[:1] if given and given[0] in _COMMANDS else _COMMANDS
    arguments = build_parser(names).parse_args(given)
    configure_logging(arguments.log_level)
    try:
        code: int | None = arguments.run(arguments)
    except MinisglError as error:
        return _fail(arguments, str(error), 2)
    except KeyboardInterrupt:
        return _fail(arguments, "interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        kind = type(error).__name__
        return _fail(arguments, f"{kind}: {error}; --debug shows where it came from", 1)
    return code or 0


def _fail(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    line = " ".join(message.split())
    names = arguments.command, getattr(arguments, "benchmark", None)
    _say(f"minisgl {' '.join(filter(None, names))}: error: {line}")
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr)
