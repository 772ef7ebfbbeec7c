"""From the logits of a batch to one token for each request that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.core import Req, TokenLogprobs
from minisgl.kernel import sampling
from minisgl.utils.transfer import HostCopy, to_device

__all__ = ["Sampled", "Sampler", "logprob_entries"]


@dataclass(frozen=True)
class Sampled:
    """`tokens [B]` int64 on the device, and a copy of them and of logprobs for the host."""

    tokens: torch.Tensor
    logprob_rows: list[int]
    """The rows that asked for logprobs."""
    logprob_tops: list[int]
    """How many alternatives each of them asked for."""
    host: HostCopy
    """`tokens`, and if any row asked, what `ranked_logprobs` returned for those that did."""

    @classmethod
    def plain(cls, tokens: torch.Tensor, device: torch.device) -> Sampled:
        """Tokens `[B]` that nobody asked logprobs for."""
        return cls(tokens, [], [], HostCopy([tokens], device))

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens and logprobs by row; waits for the step that sampled them."""
        copied, *ranked = self.host.wait()
        tokens: list[int] = copied.tolist()
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.logprob_rows:
            chosen = [tokens[row] for row in self.logprob_rows]
            found = logprob_entries(chosen, self.logprob_tops, ranked)
            for row, entry in zip(self.logprob_rows, found, strict=True):
                entries[row] = entry
        return tokens, entries


class Sampler:
    """Applies each request's `SamplingParams` in one pass over the batch.

    Parameters become vectors with one entry a row; a stage is skipped when no row needs it,
    and rows never influence each other.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, token_pool: torch.Tensor, logprobs_mode: str
    ) -> None:
        """`token_pool [rows, max_len + 1]` int32 holds the tokens of every running request."""
        self._vocab_size = vocab_size
        self._device = device
        self._token_pool = token_pool
        self._raw_logprobs = logprobs_mode == "raw"

    def sample(
        self, logits: torch.Tensor, reqs: list[Req], rows: np.ndarray, positions: np.ndarray
    ) -> Sampled:
        """One token for each of `reqs` from its row of `logits [B, V]`.

        `rows [B]` are the requests' rows in the token pool, `positions [B]` those of the tokens
        to sample: the pool holds all tokens before. Of a request only what never changes is read.
        """
        raw = logits.float()
        work = self._process(raw, reqs, rows, positions)
        tokens = sampling.argmax(work)
        final = work
        places = [i for i, req in enumerate(reqs) if not req.params.greedy]
        if places:
            chosen, index = [reqs[i] for i in places], self._vector(places)
            probs = self._probs(work[index], chosen)
            uniform = self._uniform(chosen, positions[places])
            tokens[index] = sampling.sample_from_probs(probs, uniform)
            if not self._raw_logprobs:
                final = work.clone()
                final[index] = probs.log()
        return self._with_logprobs(raw if self._raw_logprobs else final, tokens, reqs)

    def _process(
        self, raw: torch.Tensor, reqs: list[Req], rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Penalties, bias and min_tokens, on a copy if any applies."""
        penalized = [i for i, req in enumerate(reqs) if _has_penalty(req)]
        biases = [
            (i, *item) for i, req in enumerate(reqs) for item in req.params.logit_bias.items()
        ]
        bans = _bans(reqs, positions)
        if not (penalized or biases or bans):
            return raw
        work = raw.clone()
        if penalized:
            index, chosen = self._vector(penalized), [reqs[i] for i in penalized]
            work[index] = self._penalized(raw[index], chosen, rows[penalized], positions[penalized])
        if biases:
            places, ids, values = zip(*biases, strict=True)
            where = self._vector(places), self._vector(ids)
            work[where] += self._vector(values, np.float32)
        if bans:
            places, ids = zip(*bans, strict=True)
            # Not `= float("-inf")`: a plain number would be copied to the device and waited for.
            never = work.new_full((), float("-inf"))
            work[self._vector(places), self._vector(ids)] = never
        return work

    def _penalized(
        self, logits: torch.Tensor, reqs: list[Req], rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        width = int(positions.max())
        prompt_lens = np.array([req.prompt_len for req in reqs])
        bounds = to_device(np.stack((rows, prompt_lens, positions)), self._device)
        row, prompt_end, output_end = bounds.unsqueeze(2).unbind()
        tokens = self._token_pool[row.squeeze(1), :width].long()  # [b, width]
        column = torch.arange(width, device=self._device)
        in_prompt = column < prompt_end
        in_output = ~in_prompt & (column < output_end)
        params = [req.params for req in reqs]
        penalties = [
            (p.repetition_penalty or 1.0, p.presence_penalty, p.frequency_penalty) for p in params
        ]
        return sampling.apply_penalties(
            logits,
            sampling.token_counts(tokens.where(in_prompt, -1), self._vocab_size),
            sampling.token_counts(tokens.where(in_output, -1), self._vocab_size),
            self._vector(penalties, np.float32),
        )

    def _probs(self, logits: torch.Tensor, reqs: list[Req]) -> torch.Tensor:
        temperature = self._vector([req.params.temperature or 1.0 for req in reqs], np.float32)
        scaled = logits / temperature.unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        places = [i for i, req in enumerate(reqs) if _has_filter(req, self._vocab_size)]
        if places:
            chosen, index = [reqs[i].params for i in places], self._vector(places)
            every = self._vocab_size
            top_k = [min(p.top_k, every) if p.top_k and p.top_k > 0 else every for p in chosen]
            top_p = [p.top_p if p.top_p is not None else 1.0 for p in chosen]
            min_p = [p.min_p or 0.0 for p in chosen]
            probs[index] = sampling.filter_probs(
                scaled[index],
                self._vector(top_k),
                self._vector(top_p, np.float32),
                self._vector(min_p, np.float32),
            )
            if not self._raw_logprobs:
                probs[index] /= probs[index].sum(dim=-1, keepdim=True)
        return probs

    def _uniform(self, reqs: list[Req], positions: np.ndarray) -> torch.Tensor:
        keys = [req.seed for req in reqs], positions, [req.choice for req in reqs]
        return sampling.philox_uniform(*self._vector(keys).unbind())

    def _with_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, reqs: list[Req]
    ) -> Sampled:
        asked = [(i, req.params.logprobs) for i, req in enumerate(reqs)]
        rows = [i for i, top in asked if top is not None]
        tops = [top for _, top in asked if top is not None]
        if not rows:
            return Sampled.plain(tokens, self._device)
        index = self._vector(rows)
        logprobs = torch.log_softmax(logits[index], dim=-1)
        ranked = sampling.ranked_logprobs(logprobs, tokens[index], max(tops))
        return Sampled(tokens, rows, tops, HostCopy([tokens, *ranked], self._device))

    def _vector(self, values: Sequence[Any], dtype: type[np.generic] = np.int64) -> torch.Tensor:
        return to_device(np.array(values, dtype=dtype), self._device)


def logprob_entries(
    tokens: list[int], tops: list[int], ranked: Sequence[torch.Tensor]
) -> list[TokenLogprobs]:
    """`TokenLogprobs` of each row of what `ranked_logprobs` returned, `tops[i]` alternatives."""
    own, rank, values, ids = (x.tolist() for x in ranked)
    return [
        TokenLogprobs(
            token, own[i], rank[i], tuple(zip(ids[i][:top], values[i][:top], strict=True))
        )
        for i, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def _bans(reqs: list[Req], positions: np.ndarray) -> list[tuple[int, int]]:
    """`(row, token id)` of what `min_tokens` forbids: every end of rows that are shorter."""
    return [
        (i, token)
        for i, (req, position) in enumerate(zip(reqs, positions.tolist(), strict=True))
        if position - req.prompt_len < req.params.min_tokens
        for token in sorted({*req.eos_ids, *req.params.stop_token_ids})
    ]


def _has_penalty(req: Req) -> bool:
    p = req.params
    repetition = p.repetition_penalty not in (None, 1.0)
    return repetition or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _has_filter(req: Req, vocab_size: int) -> bool:
    p = req.params
    top_k = p.top_k is not None and 0 < p.top_k < vocab_size
    return top_k or p.top_p not in (None, 1.0) or p.min_p not in (None, 0.0)
