"""One place that names and formats the package's log lines (standard `logging`)."""

from __future__ import annotations

import functools
import json
import logging
import sys
from datetime import datetime, timezone
from typing import NamedTuple, TextIO

__all__ = ["JsonFormatter", "LogSettings", "configure_logging", "get_logger", "log_once"]

_HANDLER = "minisgl console"
_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's root logger `minisgl`."""
    return logging.getLogger(name if name.startswith("minisgl") else f"minisgl.{name}")


def configure_logging(level: str = "WARNING", form: str = "text") -> None:
    """Send the package's log lines to stderr; for programs, not for libraries' users.

    `form` is `"text"` or `"json"` (one object a line, see `JsonFormatter`). A later call may
    change level and form; a handler that someone else added is left as it is.
    """
    root = logging.getLogger("minisgl")
    if not root.handlers:
        console = _Console()
        console.set_name(_HANDLER)
        root.addHandler(console)
    formatter = JsonFormatter() if form == "json" else logging.Formatter(_TEXT_FORMAT)
    for handler in root.handlers:
        if handler.get_name() == _HANDLER:
            handler.setFormatter(formatter)
    root.setLevel(level.upper())


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is when a line comes: who replaced it may have closed the old."""

    @property
    def stream(self) -> TextIO:
        """Where the next line goes."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """The base class sets it; it is not kept."""


class LogSettings(NamedTuple):
    """What `configure_logging` takes."""

    level: str
    form: str

    @classmethod
    def current(cls) -> LogSettings:
        """Those of this process, for its children."""
        root = logging.getLogger("minisgl")
        json_lines = any(isinstance(h.formatter, JsonFormatter) for h in root.handlers)
        level = logging.getLevelName(root.getEffectiveLevel())
        return cls(level, "json" if json_lines else "text")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: `time` (ISO 8601, UTC), `level`, `logger`, `message`, and
    whatever the call gave as `extra`; `exception` holds a stack trace if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in record.__dict__.items():
            if name not in _RECORD_FIELDS:
                entry.setdefault(name, value)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


# What a record has without any `extra`; the last two are added by formatters, or by Python 3.12.
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time it is given; later calls with the same text do nothing."""
    logger.log(level, message)
