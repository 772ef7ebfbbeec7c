"""Chapter 7, the scheduler: which requests compute how many tokens in each step.

    python tools/make_checkpoint.py tests/configs/qwen3-0.6b.json /tmp/small \\
        --set hidden_size=256 intermediate_size=512 vocab_size=4096
    python examples/ch07_scheduler.py /tmp/small

CHECKPOINT is a model's folder or a GGUF file (random weights will do). Adds `scheduler`:
continuous batching, chunked prefill, admission and retraction.

The scheduler asks an executor for tokens and does not care who it is. The same four requests run
twice, first on a fake one without a model, then on the engine. Prints each step's batch as
request[first token:end], and what it brought. Pages are short: requests 2 and 3 wait for some,
though they have come and budget is left, and in step 9 request 1 loses its own to request 0 and
later computes all of it again. The batches are the same both times, as policy looks at lengths
and not at tokens.
"""

from __future__ import annotations

import argparse

from minisgl.config import EngineConfig
from minisgl.core import (
    Batch,
    Executor,
    FinishedStep,
    PageWrites,
    PendingStep,
    Req,
    SamplingParams,
    StepOutput,
)
from minisgl.engine import Engine
from minisgl.kvcache import NaiveCache
from minisgl.models import load_model_info
from minisgl.resolve import resolve
from minisgl.scheduler import Limits, Scheduler
from minisgl.utils.hardware import Hardware

PAGE_SIZE, NUM_PAGES = 4, 7
LIMITS = Limits(max_running_requests=3, token_budget=8, max_model_len=24)
LENGTHS = [(5, 12), (10, 11), (3, 4), (6, 3)]  # tokens of prompt and output of each request


class FakeExecutor:
    """Says that every token is 7, at once."""

    def attach(self, req: Req) -> None:
        """There is no token pool."""

    def set_pages(self, writes: PageWrites) -> None:
        """There is no page table."""

    def launch(self, batch: Batch) -> PendingStep:
        """A step that is done already, without logprobs."""
        return FinishedStep(StepOutput([7 if req.samples else None for req in batch.reqs]))


class Recorder:
    """Notes the batches on their way to another executor."""

    def __init__(self, inner: Executor) -> None:
        self.attach, self.set_pages, self._inner = inner.attach, inner.set_pages, inner
        self.batches: list[str] = []

    def launch(self, batch: Batch) -> PendingStep:
        """Note the batch, then launch it."""
        parts = [f"{req.uid}[{req.cached_len}:{req.device_len}]" for req in batch.reqs]
        self.batches.append("  ".join(parts))
        return self._inner.launch(batch)


def serve(executor: Executor) -> list[str]:
    """Run all requests to their end, print each step, return the batches."""
    recorder = Recorder(executor)
    scheduler = Scheduler(recorder, NaiveCache(NUM_PAGES, PAGE_SIZE), LIMITS)
    greedy = SamplingParams(temperature=0.0).resolve_defaults({})
    for uid, (prompt_len, output_len) in enumerate(LENGTHS):
        prompt = [11 * uid + i for i in range(prompt_len)]
        scheduler.add(Req(uid, prompt, prompt_len, greedy, max_len=prompt_len + output_len))
    while scheduler.has_work:
        retractions = scheduler.stats.num_retractions
        updates = scheduler.step()
        tokens = {u.uid: u.token_id for u in updates}
        ended = [u.uid for u in updates if u.finish_reason is not None]
        note = f"  ended: {ended}" if ended else ""
        note += "  one retracted" if scheduler.stats.num_retractions > retractions else ""
        print(f"{len(recorder.batches):>4}  {recorder.batches[-1]:<36} {tokens}{note}")
    print(f"retractions: {scheduler.stats.num_retractions}\n")
    return recorder.batches


def main() -> None:
    """Run on both executors and compare the batches."""
    parser = argparse.ArgumentParser(description="Several requests through the scheduler.")
    parser.add_argument("checkpoint", help="a model's folder, or a GGUF file")
    path = parser.parse_args().checkpoint
    print("step  batch on the fake executor           tokens by request")
    fake = serve(FakeExecutor())

    info = load_model_info(path)
    config = resolve(
        EngineConfig(dtype="float32", page_size=PAGE_SIZE, num_pages=NUM_PAGES,
                     max_model_len=LIMITS.max_model_len,
                     max_running_requests=LIMITS.max_running_requests),
        Hardware.detect(),
        info.facts(),
    )  # fmt: skip
    print("step  batch on the engine                  tokens by request")
    real = serve(Engine(path, info.config, config))
    print("same batches both times:", fake == real)


if __name__ == "__main__":
    main()
