"""Log-probabilities of prompt tokens, collected piece by piece while a prompt is computed."""

from __future__ import annotations

import torch

from minisgl.core import Batch, TokenLogprobs
from minisgl.kernel.sampling import ranked_logprobs

from .sampler import logprob_entries

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """The rows of a batch whose logits score a prompt token, and what they gave.

    The row at position p scores the prompt's token p + 1. A token scored before (the request
    was retracted and is computed again) is not scored twice.
    """

    def __init__(self, batch: Batch) -> None:
        rows: list[int] = []
        self._targets: list[int] = []
        self._tops: list[int] = []
        self._owners: list[int] = []
        start = 0
        for i, req in enumerate(batch.reqs):
            if req.params.prompt_logprobs is not None:
                first = max(req.cached_len, req.num_prompt_logprobs)
                for position in range(first, min(req.device_len, req.prompt_len - 1)):
                    rows.append(start + position - req.cached_len)
                    self._targets.append(req.token_ids[position + 1])
                    self._tops.append(req.params.prompt_logprobs)
                    self._owners.append(i)
            start += req.extend_len
        self.rows = torch.tensor(rows, dtype=torch.int64, device=batch.input_ids.device)
        self._entries: list[TokenLogprobs] = []

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        """Score the targets of `rows[offset : offset + n]` from their logits `[n, V]`."""
        piece = slice(offset, offset + logits.shape[0])
        targets, tops = self._targets[piece], self._tops[piece]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        ids = torch.tensor(targets, device=logits.device)
        ranked = ranked_logprobs(logprobs, ids, max(tops))
        self._entries += logprob_entries(targets, tops, ranked)

    def by_request(self, size: int) -> list[list[TokenLogprobs]]:
        """What was scored, for each of the batch's `size` requests in order."""
        result: list[list[TokenLogprobs]] = [[] for _ in range(size)]
        for owner, entry in zip(self._owners, self._entries, strict=True):
            result[owner].append(entry)
        return result
