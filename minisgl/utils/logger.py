"""One place that names and formats the package's log lines (standard `logging`)."""

from __future__ import annotations

import functools
import logging

__all__ = ["configure_logging", "get_logger", "log_once"]


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's root logger `minisgl`."""
    return logging.getLogger(name if name.startswith("minisgl") else f"minisgl.{name}")


def configure_logging(level: str = "WARNING") -> None:
    """Send the package's log lines to stderr; for programs, not for libraries' users."""
    root = logging.getLogger("minisgl")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(level.upper())


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time it is given; later calls with the same text do nothing."""
    logger.log(level, message)
