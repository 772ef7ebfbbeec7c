"""From the requests' times to the figures that `minisgl bench serve` reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .arrivals import Departure
from .client import Reply
from .load import Call
from .serve_options import ServeOptions
from .timing import percentiles

__all__ = ["failures", "peak_concurrency", "serve_figures"]

BUSY_SHARE = 0.8
"""Of a core: above it, the client may well be what is measured."""


def serve_figures(
    options: ServeOptions,
    calls: Sequence[Call],
    departures: Sequence[Departure],
    *,
    goodput: Mapping[str, float],
    cpu_s: float,
) -> dict[str, Any]:
    """Counts, rates and latencies of a run, ready for JSON.

    Failed requests count as failed, and in nothing else but the concurrency and the goodput's
    share. Rates are over the time from the first request sent to the last one ended.
    """
    replies = [departure.reply for departure in departures]
    good = [reply for reply in replies if reply.failure is None]
    start_s = min(reply.sent_s for reply in replies)
    duration_s = max(reply.end_s for reply in replies) - start_s
    inputs = sum(_prompt_tokens(call, d.reply) for call, d in _successes(calls, departures))
    outputs = sum(reply.output_tokens for reply in good)
    chunks = sum(len(reply.text_s) for reply in good)
    client: dict[str, Any] = {"cpu_share": _rate(cpu_s, duration_s, 3)}
    if not math.isinf(options.request_rate):
        client["lag_ms"] = percentiles([departure.lag_s * 1000 for departure in departures])
    figures: dict[str, Any] = {
        "requests": len(replies),
        "ok": len(good),
        "failed": len(replies) - len(good),
        "errors": failures(replies),
        "duration_s": round(duration_s, 3),
        "requests_per_s": _rate(len(good), duration_s, 3),
        "input_tokens": inputs,
        "cached_tokens": sum(reply.cached_tokens for reply in good),
        "output_tokens": outputs,
        "input_tok_s": _rate(inputs, duration_s),
        "output_tok_s": _rate(outputs, duration_s),
        "total_tok_s": _rate(inputs + outputs, duration_s),
        "tokens_per_chunk": _rate(outputs, chunks, 2),
        "peak_concurrency": peak_concurrency(replies),
        **_latencies(good),
    }
    if goodput:
        meeting = sum(_meets(reply, goodput) for reply in good)
        figures["goodput"] = {
            "limits_ms": dict(goodput),
            "requests": meeting,
            "share": round(meeting / len(replies), 4),
            "requests_per_s": _rate(meeting, duration_s, 3),
        }
    notes = _notes(options, calls, departures, client["cpu_share"])
    return {**figures, "client": client, "notes": notes}


def failures(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Each kind of failure, the most frequent first: how often, and the first one's message."""
    found = [reply.failure for reply in replies if reply.failure is not None]
    messages = {failure.kind: failure.message for failure in reversed(found)}
    counts = Counter(failure.kind for failure in found)
    return [
        {"kind": kind, "count": count, "message": messages[kind]}
        for kind, count in counts.most_common()
    ]


def peak_concurrency(replies: Sequence[Reply]) -> int:
    """The most requests that were in flight at a time; one that ends as another begins is not."""
    events = [(reply.sent_s, 1) for reply in replies] + [(reply.end_s, -1) for reply in replies]
    peak = running = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def _successes(
    calls: Sequence[Call], departures: Sequence[Departure]
) -> list[tuple[Call, Departure]]:
    pairs = zip(calls, departures, strict=True)
    return [(call, departure) for call, departure in pairs if departure.reply.failure is None]


def _prompt_tokens(call: Call, reply: Reply) -> int:
    """As the server counted them, else as we did, if we could."""
    return (call.prompt_len or 0) if reply.prompt_tokens is None else reply.prompt_tokens


def _latencies(good: Sequence[Reply]) -> dict[str, Any]:
    values: dict[str, Sequence[float | None]] = {
        "ttft_ms": [reply.ttft_s for reply in good],
        "tpot_ms": [reply.tpot_s for reply in good],
        "itl_ms": [gap for reply in good for gap in reply.gaps_s],
        "e2e_ms": [reply.e2e_s for reply in good],
    }
    return {
        name: percentiles(known)
        for name, seconds in values.items()
        if (known := [second * 1000 for second in seconds if second is not None])
    }


def _meets(reply: Reply, limits: Mapping[str, float]) -> bool:
    """Whether a reply keeps all limits (ms); what it has no figure of can't break one."""
    times = {"ttft": reply.ttft_s, "tpot": reply.tpot_s, "e2e": reply.e2e_s}
    return all((times[name] or 0.0) * 1000 <= limit for name, limit in limits.items())


def _rate(amount: float, per: float, digits: int = 1) -> float:
    return round(amount / per, digits) if per > 0 else 0.0


def _notes(
    options: ServeOptions,
    calls: Sequence[Call],
    departures: Sequence[Departure],
    cpu_share: float,
) -> list[str]:
    """What a reader of the figures should know."""
    notes = []
    successes = _successes(calls, departures)
    if without := sum(not d.reply.has_usage for _, d in successes):
        notes.append(f"{without} replies had no usage: their chunks were counted as tokens")
    others = [
        (call.max_tokens, d.reply.output_tokens)
        for call, d in successes
        if d.reply.has_usage and call.max_tokens != d.reply.output_tokens
    ]
    if others and options.runs_past_eos:
        asked, got = others[0]
        notes.append(
            f"{len(others)} replies have another number of tokens than was asked for "
            f"(the first one {got}, not {asked}), although EOS was to be ignored"
        )
    held = sum(departure.held for departure in departures)
    if held and not math.isinf(options.request_rate):
        notes.append(
            f"{held} requests waited for others to end (--concurrency {options.concurrency}): "
            "the rate was not kept, and their waiting is in no latency"
        )
    if cpu_share >= BUSY_SHARE:
        notes.append(
            f"this client was busy {cpu_share:.0%} of the time: latencies may be its own, and "
            "the server may be able to do more"
        )
    return notes
