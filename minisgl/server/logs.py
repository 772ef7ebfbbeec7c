"""Log lines about a busy engine and about each request; no prompt or output text is logged."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from minisgl.message import EngineStats, SequenceDelta
from minisgl.utils.logger import get_logger

from .generation import Generation, Observer

__all__ = ["RequestLogger", "StatsLogger"]

logger = get_logger(__name__)


class _Mark(NamedTuple):
    """The counts at the moment from which rates are computed."""

    time_s: float
    num_prefill_tokens: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_output_tokens: int = 0


class StatsLogger(Observer):
    """An `Observer` that logs one line every `interval_s` (above 0) seconds while steps are done.

    It needs no timer, as it only speaks when a step was done: an idle engine is silent.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._num_output_tokens = 0
        self._since: _Mark | None = None
        """The window's begin; None before the first step."""
        self._last: _Mark | None = None
        """After the latest step."""

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """Count what comes out."""
        self._num_output_tokens += len(delta.token_ids)

    def on_stats(self, stats: EngineStats) -> None:
        """Log the window since the last line once it is long enough."""
        begin_s = stats.time_s - stats.step_s
        if self._last is None:
            self._since = _Mark(begin_s)
        elif begin_s - self._last.time_s > self._interval_s:  # it was idle: don't average over that
            self._since = self._last._replace(time_s=begin_s)
        now = self._last = _Mark(
            stats.time_s,
            stats.num_prefill_tokens,
            stats.num_queried_tokens,
            stats.num_hit_tokens,
            self._num_output_tokens,
        )
        assert self._since is not None
        if now.time_s - self._since.time_s >= self._interval_s:
            _log_window(self._since, now, stats)
            self._since = now


def _log_window(since: _Mark, now: _Mark, stats: EngineStats) -> None:
    seconds = now.time_s - since.time_s
    queried = now.num_queried_tokens - since.num_queried_tokens
    hits = now.num_hit_tokens - since.num_hit_tokens
    fields = {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "prefill_tokens_per_s": (now.num_prefill_tokens - since.num_prefill_tokens) / seconds,
        "output_tokens_per_s": (now.num_output_tokens - since.num_output_tokens) / seconds,
        "cache_hit_rate": hits / queried if queried else 0.0,
        "kv_cache_usage": stats.kv_cache_usage,
    }
    logger.info(
        "running %(num_running)d, waiting %(num_waiting)d, "
        "prefill %(prefill_tokens_per_s).1f tokens/s, output %(output_tokens_per_s).1f tokens/s, "
        "cache hits %(cache_hit_rate).1f %%, KV cache %(kv_cache_usage).1f %%",
        {**fields, **{name: 100 * fields[name] for name in ("cache_hit_rate", "kv_cache_usage")}},
        extra=fields,
    )


class RequestLogger(Observer):
    """An `Observer` that logs one line when a request ends; it remembers nothing."""

    def on_end(self, generation: Generation) -> None:
        """Log its counts and times."""
        if not logger.isEnabledFor(logging.INFO):
            return
        start, ended_s = generation.start, generation.ended_s
        total_s = (time.monotonic() if ended_s is None else ended_s) - generation.submitted_s
        ttft_s = None if start is None else start.first_token_s - generation.submitted_s
        reasons = [reason or "abort" for reason in generation.finish_reasons]
        fields = {
            "request_id": generation.request_id,
            "prompt_tokens": len(generation.prompt_token_ids),
            "cached_tokens": generation.num_cached_tokens,
            "output_tokens": generation.num_output_tokens,
            "ttft_ms": None if ttft_s is None else round(1e3 * ttft_s, 3),
            "total_s": round(total_s, 6),
            "tokens_per_s": round(generation.num_output_tokens / max(total_s, 1e-6), 3),
            "finish_reasons": reasons,
        }
        logger.info(
            "request %r: prompt %d tokens (%d cached), output %d, first token %s, "
            "%.3f s, %.1f tokens/s, %s",
            fields["request_id"],  # a client's string: repr keeps it on its line
            fields["prompt_tokens"],
            fields["cached_tokens"],
            fields["output_tokens"],
            "none" if ttft_s is None else f"{1e3 * ttft_s:.1f} ms",
            total_s,
            fields["tokens_per_s"],
            ", ".join(reasons),
            extra=fields,
        )
