"""How far a batch is: a bar while it runs, a line at its end."""

from __future__ import annotations

import time
from types import TracebackType

from tqdm import tqdm

from minisgl.message import EngineStats, SequenceDelta

from ..generation import Generation, Observer

__all__ = ["Progress"]


class Progress(Observer):
    """Counts lines, and (as an `Observer` of the engine) tokens.

    The bar is on stderr, if that is a terminal; of `total` lines (None: not known) the
    `num_earlier` that were done by earlier runs count as there.
    """

    def __init__(self, total: int | None, num_earlier: int) -> None:
        self.num_done = 0
        self.num_failed = 0
        self.num_skipped = 0
        """Lines of the input that earlier runs had done."""
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._start_s = time.monotonic()
        self._bar = tqdm(
            total=total,
            initial=num_earlier,
            desc="Batch",
            unit="line",
            dynamic_ncols=True,
            disable=None,
        )

    def on_delta(self, generation: Generation, delta: SequenceDelta, now_s: float) -> None:
        """Count tokens: a prompt's at the first delta that says it was read."""
        if delta.start is not None and delta.uid == generation.first_uid:
            self._prompt_tokens += len(generation.prompt_token_ids)
        self._output_tokens += len(delta.token_ids)

    def on_stats(self, stats: EngineStats) -> None:
        """Keep the bar's rate current while no line finishes."""
        self._show(0)

    def count(self, *, failed: bool) -> None:
        """A line was written."""
        if failed:
            self.num_failed += 1
        else:
            self.num_done += 1
        self._show(1)

    def _show(self, num_lines: int) -> None:
        rate = self._output_tokens / self._seconds()
        self._bar.set_postfix_str(f"{self.num_failed} failed, {rate:.0f} tok/s", refresh=False)
        self._bar.update(num_lines)

    def summary(self) -> str:
        """Counts and rates of this run."""
        seconds = self._seconds()
        skipped = f", {self.num_skipped} done before" if self.num_skipped else ""
        return (
            f"[{self.num_done} done, {self.num_failed} failed{skipped} | "
            f"{self._prompt_tokens} prompt + {self._output_tokens} output tokens | "
            f"{seconds:.1f} s | {self._output_tokens / seconds:.1f} tok/s]"
        )

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-6)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
