"""The latencies of `minisgl bench serve` as a picture: distributions, and the run over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.errors import ConfigError

from .arrivals import Departure
from .client import Reply

__all__ = ["check_plot", "save_plot"]

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raise `ConfigError` now, not after the run, if no picture could be written there."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot = {path!r} must end in one of {', '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot = {path!r}: there is no folder {str(file.parent)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def save_plot(path: str, departures: Sequence[Departure], title: str) -> None:
    """Draw the distributions of TTFT, ITL and E2E, and each request over time, into a file."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    replies = [departure.reply for departure in departures]
    good = [reply for reply in replies if reply.failure is None]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots(2, 2).flat
    panels: dict[str, list[float]] = {
        "time to first token": [s for reply in good if (s := reply.ttft_s) is not None],
        "time between chunks": [gap for reply in good for gap in reply.gaps_s],
        "whole request": [reply.e2e_s for reply in good],
    }
    for axis, (name, seconds) in zip(axes, panels.items(), strict=False):
        _draw_distribution(axis, name, seconds)
    _draw_timeline(axes[3], replies)
    figure.savefig(path)


def _draw_distribution(axis: Any, name: str, seconds: Sequence[float]) -> None:
    """The share of values that are at most as large, with p50 and p99 marked."""
    values = sorted(second * 1000 for second in seconds)
    count = len(values)
    if values:
        axis.step(values, [(rank + 1) / count for rank in range(count)], where="post")
        for share in (0.5, 0.99):
            value = values[min(count - 1, int(share * count))]
            label = f"p{share * 100:.0f} {value:.1f} ms"
            axis.axvline(value, color="0.6", linestyle="--" if share == 0.5 else ":", label=label)
        axis.legend(loc="lower right")
    axis.set(title=name, xlabel="ms", ylabel="share of values", xlim=(0, None), ylim=(0, 1.02))


def _draw_timeline(axis: Any, replies: Sequence[Reply]) -> None:
    """A line for each request: waiting for its first token, then answered, or failed."""
    start_s = min(reply.sent_s for reply in replies)
    spans: dict[str, tuple[str, list[int], list[float], list[float]]] = {
        "until the first token": ("tab:orange", [], [], []),
        "answering": ("tab:blue", [], [], []),
        "failed": ("tab:red", [], [], []),
    }

    def add(name: str, row: int, begin_s: float, end_s: float) -> None:
        _, rows, begins, ends = spans[name]
        rows.append(row)
        begins.append(begin_s - start_s)
        ends.append(end_s - start_s)

    for row, reply in enumerate(sorted(replies, key=lambda reply: reply.sent_s)):
        if reply.failure is not None or reply.first_s is None:
            add("failed", row, reply.sent_s, reply.end_s)
        else:
            add("until the first token", row, reply.sent_s, reply.first_s)
            add("answering", row, reply.first_s, reply.end_s)
    for name, (color, rows, begins, ends) in spans.items():
        if rows:
            axis.hlines(rows, begins, ends, colors=color, label=name)
    axis.set(title="requests over time", xlabel="s", ylabel="request")
    axis.legend(loc="lower right")
