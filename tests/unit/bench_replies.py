"""Replies to a load client, made up from streams or from times, and the figures of them."""

from __future__ import annotations

import json
from typing import Any

from minisgl.benchmark import figures
from minisgl.benchmark.arrivals import Departure
from minisgl.benchmark.client import Reply, read_reply
from minisgl.benchmark.load import Call
from minisgl.benchmark.serve_options import ServeOptions


def sse(*chunks: Any) -> bytes:
    """Server-sent events of these objects; `[DONE]` is not added."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def text(*parts: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "".join(parts), "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


DONE = b"data: [DONE]\n\n"


def read(*reads: tuple[float, bytes]) -> Reply:
    return read_reply(reads, Reply(10.0, 20.0))


def good(sent_s: float, marks: list[float], end_s: float, tokens: int, prompt: int = 4) -> Reply:
    return Reply(
        sent_s, end_s, marks[0], marks[-1], marks, True, prompt, output_tokens=tokens
    )  # fmt: skip


def figured(
    replies: list[Reply], *, asked: int = 3, cpu_s: float = 0.0, held: bool = False, **options: Any
) -> dict[str, Any]:
    goodput = options.pop("goodput", {})
    departures = [Departure(reply.sent_s - 0.001, held, reply) for reply in replies]
    return figures.serve_figures(
        ServeOptions(**options),
        [Call(b"", 4, asked)] * len(replies),
        departures,
        goodput=goodput,
        cpu_s=cpu_s,
    )
