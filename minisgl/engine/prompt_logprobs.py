"""Log-probabilities of prompt tokens, collected piece by piece while a prompt is computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from minisgl.core import Batch, TokenLogprobs
from minisgl.kernel.sampling import ranked_logprobs
from minisgl.utils.transfer import HostCopy, to_device

from .sampler import logprob_entries

__all__ = ["PromptLogprobs"]


class _Piece(NamedTuple):
    """Scores of some rows, on their way to the host."""

    rows: slice
    ranked: HostCopy


class PromptLogprobs:
    """The rows of a batch whose logits score a prompt token, and what they gave.

    The row at position p scores the prompt's token p + 1. A token scored before (the request
    was retracted and is computed again) is not scored twice.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._device = device
        rows: list[int] = []
        self._targets: list[int] = []
        self._tops: list[int] = []
        self._owners: list[int] = []
        starts = np.cumsum(batch.extend_lens) - batch.extend_lens
        spans = np.stack((starts, batch.cached_lens, batch.device_lens), axis=1).tolist()
        for i, (req, (start, cached, end)) in enumerate(zip(batch.reqs, spans, strict=True)):
            if req.params.prompt_logprobs is not None:
                first = max(cached, req.num_prompt_logprobs)
                for position in range(first, min(end, req.prompt_len - 1)):
                    rows.append(start + position - cached)
                    self._targets.append(req.token_ids[position + 1])
                    self._tops.append(req.params.prompt_logprobs)
                    self._owners.append(i)
        self.rows = to_device(np.array(rows, dtype=np.int64), self._device)
        self._pieces: list[_Piece] = []

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        """Score the targets of `rows[offset : offset + n]` from their logits `[n, V]`."""
        rows = slice(offset, offset + logits.shape[0])
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        ids = to_device(np.array(self._targets[rows], dtype=np.int64), self._device)
        ranked = ranked_logprobs(logprobs, ids, max(self._tops[rows]))
        self._pieces.append(_Piece(rows, HostCopy(ranked, self._device)))

    def by_request(self, size: int) -> list[list[TokenLogprobs]]:
        """What was scored, for each of the batch's `size` requests in order; waits for it."""
        result: list[list[TokenLogprobs]] = [[] for _ in range(size)]
        for rows, ranked in self._pieces:
            entries = logprob_entries(self._targets[rows], self._tops[rows], ranked.wait())
            for owner, entry in zip(self._owners[rows], entries, strict=True):
                result[owner].append(entry)
        return result
