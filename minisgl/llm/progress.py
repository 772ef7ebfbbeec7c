"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import time
from collections.abc import Collection

from tqdm import tqdm

from minisgl.core import Req
from minisgl.scheduler import Update

__all__ = ["Progress"]


class Progress:
    """Counts finished sequences, with prefill and decode tokens per second beside them."""

    def __init__(self, reqs: Collection[Req], shown: bool) -> None:
        self._reqs = {req.uid: req for req in reqs}
        self._bar = tqdm(
            total=len(reqs), desc="Generating", disable=not shown, dynamic_ncols=True, unit="seq"
        )
        self._start = time.perf_counter()
        self._prompt_tokens = 0
        self._output_tokens = 0

    def update(self, update: Update) -> None:
        """Take one update of the scheduler into account, if it is of these requests."""
        req = self._reqs.get(update.uid)
        if req is None:
            return
        if update.token_id is not None:
            self._output_tokens += 1
            if len(req.token_ids) == req.prompt_len + 1:
                self._prompt_tokens += req.prompt_len - req.num_cached_tokens
        if update.finish_reason is not None:
            seconds = max(time.perf_counter() - self._start, 1e-9)
            self._bar.set_postfix_str(
                f"prefill {self._prompt_tokens / seconds:.0f} tok/s, "
                f"decode {self._output_tokens / seconds:.0f} tok/s",
                refresh=False,
            )
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
