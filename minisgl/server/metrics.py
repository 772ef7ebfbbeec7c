"""Prometheus metrics of a running engine: vLLM's names, with the prefix `minisgl:`.

A dashboard made for vLLM works once the prefix is changed. Each `Metrics` has a registry of its
own, so that two engines in one process (tests, notebooks) don't meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from minisgl.message import EngineStats, SequenceDelta

from .generation import Generation, Observer

__all__ = ["FINISHED_REASONS", "Metrics"]

FINISHED_REASONS = ("stop", "length", "abort", "error")

_DECADES = range(-3, 3)
_SECONDS = tuple(round(step * 10.0**decade, 9) for decade in _DECADES for step in (1, 2, 5))
"""1 ms to 500 s, three a decade: from a token of a small model to a long answer."""
_ITERATION_TOKENS = tuple(float(2**power) for power in range(15))


@dataclass
class _Live:
    """What is remembered of a request until it ends."""

    first_s: float | None
    """When its first token came."""
    last_s: list[float | None]
    """When each sequence got its latest tokens."""


class Metrics(Observer):
    """An `Observer` that counts and times what it sees.

    Tokens of a prompt count when its first token comes, once however many sequences were asked
    for; `request_success` counts sequences, each of which is a request to the scheduler. The
    latency histograms hold requests all of whose sequences ended by stop or length: what a
    client broke off says nothing about speed.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._live: dict[int, _Live] = {}  # by first uid
        self._last_stats: EngineStats | None = None

        self._running = self._gauge("num_requests_running", "Sequences that steps work on.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences in the queue.")
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache's pages that requests hold, 0 to 1."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._preemptions = self._counter(
            "num_preemptions", "Times a sequence gave up its pages and was queued again."
        )
        self._success = Counter(
            "minisgl:request_success",
            "Sequences that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._ended = {
            reason: self._success.labels(model_name, reason) for reason in FINISHED_REASONS
        }
        self._errors = Counter(
            "minisgl:request_errors",
            "HTTP requests answered with an error, by status.",
            ["model_name", "code"],
            registry=self._registry,
        )
        self._make_histograms()

    def _make_histograms(self) -> None:
        self._ttft = self._seconds(
            "time_to_first_token_seconds", "From the queue's entry to the first token."
        )
        self._itl = self._seconds(
            "inter_token_latency_seconds", "Between two tokens of one sequence."
        )
        self._e2e = self._seconds("e2e_request_latency_seconds", "From submission to the end.")
        self._queue_time = self._seconds("request_queue_time_seconds", "From submission to start.")
        self._prefill_time = self._seconds(
            "request_prefill_time_seconds", "From the start to the first token."
        )
        self._decode_time = self._seconds(
            "request_decode_time_seconds", "From the first token to the end."
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens", "Tokens computed by one step.", _ITERATION_TOKENS
        )

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def on_error(self, status: int) -> None:
        """An HTTP request was answered with this error status."""
        self._errors.labels(self._model_name, str(status)).inc()

    # -- Observer --------------------------------------------------------------------------

    def on_submit(self, generation: Generation) -> None:
        """Begin to follow a request."""
        self._live[generation.first_uid] = _Live(None, [None] * generation.params.n)

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """Count and time the tokens of a sequence."""
        count = len(delta.token_ids)
        live = self._live.get(generation.first_uid)
        if not count or live is None:
            return
        if live.first_s is None:
            live.first_s = now_s
            self._prompt_tokens.inc(len(generation.prompt_token_ids))
            self._ttft.observe(now_s - generation.submitted_s)
        self._generation_tokens.inc(count)
        index = generation.index_of(delta)
        last_s = live.last_s[index]
        live.last_s[index] = now_s
        if last_s is not None:
            for _ in range(count):  # tokens that came together share the time
                self._itl.observe((now_s - last_s) / count)

    def on_end(self, generation: Generation) -> None:
        """Count how the sequences ended, time the request, forget it."""
        live = self._live.pop(generation.first_uid, None)
        if live is None:
            return
        reasons = [reason or "abort" for reason in generation.finish_reasons]
        for reason in reasons:
            self._ended[reason].inc()
        start, ended_s = generation.start, generation.ended_s
        if start is None or ended_s is None or not {"stop", "length"}.issuperset(reasons):
            return
        self._e2e.observe(ended_s - generation.submitted_s)
        self._queue_time.observe(start.started_s - generation.submitted_s)
        self._prefill_time.observe(start.first_token_s - start.started_s)
        self._decode_time.observe(ended_s - start.first_token_s)

    def on_stats(self, stats: EngineStats) -> None:
        """Take the state after a step; counters move by what changed since the last one."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        last, self._last_stats = self._last_stats, stats
        self._cache_queries.inc(stats.num_queried_tokens - (last.num_queried_tokens if last else 0))
        self._cache_hits.inc(stats.num_hit_tokens - (last.num_hit_tokens if last else 0))
        self._preemptions.inc(stats.num_retractions - (last.num_retractions if last else 0))
        steps = stats.num_steps - (last.num_steps if last else 0)
        tokens = stats.num_computed_tokens - (last.num_computed_tokens if last else 0)
        for _ in range(steps):  # one, unless steps were reported together
            self._iteration_tokens.observe(tokens / steps)

    # -- making them -----------------------------------------------------------------------

    # Each returns the child for our one label: `labels()` takes a lock and a dict look-up, too
    # much for every token.

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"minisgl:{name}", text, ["model_name"], registry=self._registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"minisgl:{name}", text, ["model_name"], registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"minisgl:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, _SECONDS)
