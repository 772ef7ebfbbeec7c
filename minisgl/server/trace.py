"""A Chrome trace of steps and requests, to be opened in Perfetto (ui.perfetto.dev).

    host     |plan 2|launch 2|read 1|plan 3|launch 3|read 2|      what the scheduler does
    device   |step 1 ...............|step 2 ...............|      what it overlaps with
    lane 1   |cmpl-1 ......................................|      each request's sequence on a lane
             |queue|prefill|decode.........................|      of its own, which the next one
    lane 2          |cmpl-2 ....|                                 takes over when it ends

The file is a JSON array of events, written as they come; times are microseconds of the
monotonic clock. Viewers also read it without its closing bracket, as a crash would leave it.
"""

from __future__ import annotations

import heapq
import json
import time
from dataclasses import dataclass
from typing import Any, TextIO

from minisgl.errors import ConfigError
from minisgl.message import RequestStart, SequenceDelta, StepTrace
from minisgl.utils.logger import get_logger

from .generation import Generation, Observer

__all__ = ["TraceWriter"]

logger = get_logger(__name__)

_PROCESS = 1
_HOST, _DEVICE = 0, 1
"""Thread ids; that of lane n is n + 1."""
_FLUSH_S = 1.0


@dataclass
class _Sequence:
    """A sequence that has not ended."""

    lane: int
    start: RequestStart | None = None
    num_output_tokens: int = 0


class TraceWriter(Observer):
    """An `Observer` that writes a trace file; `close()` completes it.

    Raises `ConfigError` if the file can't be written at the start; if it can't later (a full
    disk), a warning is logged and tracing ends, not the server.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"--trace-file {path!r} can't be written: {error.strerror}: name another file"
            ) from error
        self._buffer: list[str] = []
        self._separator = "[\n"
        self._flushed_s = time.monotonic()
        self._sequences: dict[int, _Sequence] = {}  # by uid
        self._free_lanes: list[int] = []  # a heap, so that the picture stays low
        self._num_lanes = 0
        self._name("process_name", _HOST, "minisgl")
        self._name("thread_name", _HOST, "host")
        self._name("thread_name", _DEVICE, "device")

    def close(self) -> None:
        """Complete the file: sequences that have not ended are left out. May be called twice."""
        if self._file is not None:
            self._buffer.append("\n]\n")
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- Observer --------------------------------------------------------------------------

    def on_submit(self, generation: Generation) -> None:
        """Give each of its sequences a lane."""
        for index in range(generation.params.n):
            self._sequences[generation.first_uid + index] = _Sequence(self._take_lane())

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """Follow a sequence, and draw it once it ended."""
        sequence = self._sequences.get(delta.uid)
        if sequence is None:
            return
        sequence.start = sequence.start or delta.start
        sequence.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._draw(generation, delta.uid, delta.finish_reason, now_s)

    def on_end(self, generation: Generation) -> None:
        """Draw the sequences that ended without saying so."""
        for index, reason in enumerate(generation.finish_reasons):
            uid = generation.first_uid + index
            if uid in self._sequences:
                self._draw(generation, uid, reason or "abort", time.monotonic())

    def on_step(self, step: StepTrace) -> None:
        """Draw a step, what the host did for it and what the device did."""
        self._span(f"plan {step.number}", _HOST, step.plan_s, step.launch_s)
        self._span(f"launch {step.number}", _HOST, step.launch_s, step.launched_s)
        self._span(f"read {step.number}", _HOST, step.read_s, step.read_end_s)
        args = {
            "requests": step.num_reqs,
            "decode_tokens": step.num_decode_tokens,
            "prefill_tokens": step.num_prefill_tokens,
            "cuda_graph": step.is_replayed,
        }
        self._span(f"step {step.number}", _DEVICE, step.device_s, step.device_end_s, args)

    # -- drawing ---------------------------------------------------------------------------

    def _draw(self, generation: Generation, uid: int, reason: str, end_s: float) -> None:
        sequence = self._sequences.pop(uid)
        lane, start, begin_s = sequence.lane, sequence.start, generation.submitted_s
        several = generation.params.n > 1
        name = generation.request_id + (f" [{uid - generation.first_uid}]" if several else "")
        args = {
            "prompt_tokens": len(generation.prompt_token_ids),
            "cached_tokens": start.num_cached_tokens if start is not None else 0,
            "output_tokens": sequence.num_output_tokens,
            "finish_reason": reason,
        }
        self._span(name, lane, begin_s, end_s, args)
        if start is None:
            self._span("queue", lane, begin_s, end_s)
        else:
            self._span("queue", lane, begin_s, start.started_s)
            self._span("prefill", lane, start.started_s, start.first_token_s)
            self._span("decode", lane, start.first_token_s, end_s)
        heapq.heappush(self._free_lanes, lane)

    def _take_lane(self) -> int:
        if self._free_lanes:
            return heapq.heappop(self._free_lanes)
        self._num_lanes += 1
        thread = _DEVICE + self._num_lanes
        self._name("thread_name", thread, f"lane {self._num_lanes}")
        return thread

    def _name(self, what: str, thread: int, name: str) -> None:
        """Write the name of the process, or of a thread."""
        self._write(
            {
                "name": what,
                "ph": "M",
                "ts": 0,
                "pid": _PROCESS,
                "tid": thread,
                "args": {"name": name},
            }
        )

    def _span(
        self,
        name: str,
        thread: int,
        begin_s: float,
        end_s: float,
        args: dict[str, Any] | None = None,
    ) -> None:
        # Both ends are rounded, not the duration: a span then ends exactly where the next begins.
        begin, end = int(begin_s * 1e6), int(end_s * 1e6)
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": begin,
                "dur": max(0, end - begin),
                "pid": _PROCESS,
                "tid": thread,
                "args": args or {},
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._buffer.append(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"
        if time.monotonic() - self._flushed_s >= _FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        assert self._file is not None
        text, self._buffer = "".join(self._buffer), []
        self._flushed_s = time.monotonic()
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            logger.warning("the trace ends here, its file can't be written: %s", error.strerror)
            self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            pass  # closing writes what is left, which fails like before
