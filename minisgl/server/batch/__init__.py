"""OpenAI batch files: a file of requests in, a file of answers out, no HTTP between.

    input ──> lines ──> runner: workers, one line each at a time ──> OpenAIService ──> output
              (read as needed)  (a refused line gets its answer too)      (appended as they finish)

A line goes through the same models, checks and errors as the body of a request to `minisgl
serve`, so it means the same. Invariant: the output has at most one line per `custom_id`, and
whenever the process ends, however it does, the same command goes on where it stopped.
Read next: `lines.py` for the two shapes, `output.py` for resuming, `runner.py`, `command.py`.
"""

from __future__ import annotations

from .command import BatchJob, run_batch
from .output import OutputFile
from .progress import Progress
from .runner import BatchRunner

__all__ = ["BatchJob", "BatchRunner", "OutputFile", "Progress", "run_batch"]
