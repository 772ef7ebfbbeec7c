"""`minisgl bench serve`: requests over HTTP to any OpenAI-compatible server.

The order of things: ask the server for its model, make all bodies (`load.py`), warm up, send
(`arrivals.py`, `client.py`), and only then compute the figures (`figures.py`).
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tqdm import tqdm

from minisgl.errors import ConfigError, RequestFailedError
from minisgl.server.config import API_KEY_VARIABLE

from .arrivals import Departure, arrival_times, drive
from .client import Client, Reply
from .figures import failures, serve_figures
from .load import Call, measured_calls, warm_up_calls
from .serve_options import ServeOptions

__all__ = ["ServeRun", "bench_serve", "describe"]


class ServeRun(NamedTuple):
    """A finished benchmark."""

    results: dict[str, Any]
    """figures, ready for JSON"""
    departures: list[Departure]
    """each request's times, for plots"""


def bench_serve(options: ServeOptions, *, goodput: Mapping[str, float] | None = None) -> ServeRun:
    """Send the requests and measure them. `goodput` are limits in ms for ttft, tpot and e2e.

    Requests that fail are part of the results. Raises `ConfigError` if no server answers, and
    `RequestFailedError` if the warm-up fails as a whole.
    """
    return asyncio.run(_bench(options, goodput or {}))


async def _bench(options: ServeOptions, goodput: Mapping[str, float]) -> ServeRun:
    client = Client(
        options.base_url,
        options.endpoint,
        api_key=options.api_key or os.environ.get(API_KEY_VARIABLE),
        timeout_s=options.timeout,
    )
    async with client:
        first = await client.first_model()
        model = options.model or first
        if model is None:
            raise ConfigError(f"{options.base_url}/v1/models names no model: set --model")
        calls = measured_calls(options, model)
        await _warm_up(client, warm_up_calls(options, model))
        due_s = arrival_times(len(calls), options.request_rate, options.seed)
        cpu_s = time.process_time()
        with _left_alone_by_the_collector():
            departures = await _send(client, calls, due_s, options.concurrency)
        cpu_s = time.process_time() - cpu_s
    figures = serve_figures(options, calls, departures, goodput=goodput, cpu_s=cpu_s)
    return ServeRun({**_asked(options, model), **figures}, departures)


async def _warm_up(client: Client, calls: Sequence[Call]) -> None:
    departures = await drive([call.body for call in calls], client.stream, due_s=[0.0] * len(calls))
    failed = failures([departure.reply for departure in departures])
    if departures and sum(row["count"] for row in failed) == len(departures):
        raise RequestFailedError(f"the warm-up's requests all failed: {describe(failed)}")


async def _send(
    client: Client, calls: Sequence[Call], due_s: Sequence[float], concurrency: int | None
) -> list[Departure]:
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=len(calls), unit="req", mininterval=0.5, leave=False, disable=None) as bar:

        async def send(body: bytes) -> Reply:
            reply = await client.stream(body)
            bar.update()
            return reply

        bodies = [call.body for call in calls]
        return await drive(bodies, send, due_s=due_s, concurrency=concurrency)


@contextmanager
def _left_alone_by_the_collector() -> Iterator[None]:
    """Keep what exists by now out of the garbage collector's searches.

    That is all modules' contents: a search of those would stop the clock's readings for as long
    as a token takes, or longer.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe(errors: Sequence[Mapping[str, Any]]) -> str:
    """The `errors` of the results in one line."""
    return "; ".join(f"{row['count']} x {row['kind']}: {row['message']}" for row in errors)


def _asked(options: ServeOptions, model: str) -> dict[str, Any]:
    """What the figures are of."""
    dataset = options.dataset
    return {
        "benchmark": "serve",
        "url": options.base_url,
        "model": model,
        "endpoint": options.endpoint,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "concurrency": options.concurrency,
        "dataset": dataset,
        "input_len": str(options.input_range) if dataset is None else None,
        "output_len": str(options.output_range),
        "shared_prefix_len": options.shared_prefix_len if dataset is None else None,
        "ignore_eos": options.runs_past_eos,
        "temperature": options.temperature,
        "seed": options.seed,
        "warmup": options.warmup,
    }
