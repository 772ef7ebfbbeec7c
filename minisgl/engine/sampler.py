"""From the logits of a batch to one token for each request that samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.core import Req, TokenLogprobs
from minisgl.kernel import sampling

__all__ = ["Sampled", "Sampler", "logprob_entries"]


@dataclass(frozen=True)
class Sampled:
    """`tokens [B]` int64 on the device, and for the rows that asked, their logprobs."""

    tokens: torch.Tensor
    logprob_rows: list[int]
    logprobs: tuple[torch.Tensor, ...]  # as `ranked_logprobs` returns them; empty if no rows

    def entries(self, reqs: list[Req]) -> list[TokenLogprobs | None]:
        """Logprobs by request in the batch's order; reads the device."""
        result: list[TokenLogprobs | None] = [None] * len(reqs)
        if self.logprob_rows:
            tokens = self.tokens[self.logprob_rows].tolist()
            tops = [reqs[row].params.logprobs or 0 for row in self.logprob_rows]
            entries = logprob_entries(tokens, tops, self.logprobs)
            for row, entry in zip(self.logprob_rows, entries, strict=True):
                result[row] = entry
        return result


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

    def sample(self, logits: torch.Tensor, reqs: list[Req]) -> Sampled:
        """One token for each of `reqs` from its row of `logits [B, V]`."""
        raw = logits.float()
        work = self._process(raw, reqs)
        tokens = sampling.argmax(work)
        final = work
        rows = [i for i, req in enumerate(reqs) if not req.params.greedy]
        if rows:
            chosen = [reqs[i] for i in rows]
            probs = self._probs(work[rows], chosen)
            tokens[rows] = sampling.sample_from_probs(probs, self._uniform(chosen))
            if not self._raw_logprobs:
                final = work.clone()
                final[rows] = probs.log()
        return self._with_logprobs(raw if self._raw_logprobs else final, tokens, reqs)

    def _process(self, raw: torch.Tensor, reqs: list[Req]) -> torch.Tensor:
        """Penalties, bias and min_tokens, on a copy if any applies."""
        work = raw
        rows = [i for i, req in enumerate(reqs) if _has_penalty(req)]
        if rows:
            work = raw.clone()
            work[rows] = self._penalized(raw[rows], [reqs[i] for i in rows])
        for i, req in enumerate(reqs):
            banned: set[int] = set()
            if req.num_output < req.params.min_tokens:
                banned = {*req.eos_ids, *req.params.stop_token_ids}
            if not banned and not req.params.logit_bias:
                continue
            work = raw.clone() if work is raw else work
            if req.params.logit_bias:
                ids = torch.tensor(list(req.params.logit_bias), device=self._device)
                values = list(req.params.logit_bias.values())
                work[i, ids] += torch.tensor(values, dtype=torch.float32, device=self._device)
            if banned:
                work[i, torch.tensor(sorted(banned), device=self._device)] = float("-inf")
        return work

    def _penalized(self, logits: torch.Tensor, reqs: list[Req]) -> torch.Tensor:
        lengths = self._vector([len(req.token_ids) for req in reqs], torch.int64)
        prompts = self._vector([req.prompt_len for req in reqs], torch.int64)
        rows = self._vector([req.row for req in reqs], torch.int64)
        width = max(len(req.token_ids) for req in reqs)
        tokens = self._token_pool[rows, :width].long()  # [b, width]
        column = torch.arange(width, device=self._device)
        in_prompt = column < prompts.unsqueeze(1)
        in_output = ~in_prompt & (column < lengths.unsqueeze(1))
        penalties = [
            [
                req.params.repetition_penalty or 1.0,
                req.params.presence_penalty,
                req.params.frequency_penalty,
            ]
            for req in reqs
        ]
        return sampling.apply_penalties(
            logits,
            sampling.token_counts(tokens.where(in_prompt, -1), self._vocab_size),
            sampling.token_counts(tokens.where(in_output, -1), self._vocab_size),
            torch.tensor(penalties, dtype=torch.float32, device=self._device),
        )

    def _probs(self, logits: torch.Tensor, reqs: list[Req]) -> torch.Tensor:
        temperature = self._vector([req.params.temperature or 1.0 for req in reqs])
        scaled = logits / temperature.unsqueeze(1)
        probs = torch.softmax(scaled, dim=-1)
        rows = [i for i, req in enumerate(reqs) if _has_filter(req, self._vocab_size)]
        if rows:
            chosen = [reqs[i].params for i in rows]
            every = self._vocab_size
            top_k = [min(p.top_k, every) if p.top_k and p.top_k > 0 else every for p in chosen]
            probs[rows] = sampling.filter_probs(
                scaled[rows],
                self._vector(top_k, torch.int64),
                self._vector([p.top_p if p.top_p is not None else 1.0 for p in chosen]),
                self._vector([p.min_p or 0.0 for p in chosen]),
            )
            if not self._raw_logprobs:
                probs[rows] /= probs[rows].sum(dim=-1, keepdim=True)
        return probs

    def _uniform(self, reqs: list[Req]) -> torch.Tensor:
        return sampling.philox_uniform(
            self._vector([req.seed for req in reqs], torch.int64),
            self._vector([len(req.token_ids) for req in reqs], torch.int64),
            self._vector([req.choice for req in reqs], torch.int64),
        )

    def _with_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, reqs: list[Req]
    ) -> Sampled:
        rows = [i for i, req in enumerate(reqs) if req.params.logprobs is not None]
        if not rows:
            return Sampled(tokens, [], ())
        top = max(reqs[i].params.logprobs or 0 for i in rows)
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        return Sampled(tokens, rows, sampling.ranked_logprobs(logprobs, tokens[rows], top))

    def _vector(
        self, values: list[float] | list[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def logprob_entries(
    tokens: list[int], tops: list[int], ranked: tuple[torch.Tensor, ...]
) -> list[TokenLogprobs]:
    """`TokenLogprobs` of each row of what `ranked_logprobs` returned, `tops[i]` alternatives."""
    own, rank, values, ids = (x.tolist() for x in ranked)
    return [
        TokenLogprobs(
            token, own[i], rank[i], tuple(zip(ids[i][:top], values[i][:top], strict=True))
        )
        for i, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def _has_penalty(req: Req) -> bool:
    p = req.params
    repetition = p.repetition_penalty not in (None, 1.0)
    return repetition or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _has_filter(req: Req, vocab_size: int) -> bool:
    p = req.params
    top_k = p.top_k is not None and 0 < p.top_k < vocab_size
    return top_k or p.top_p not in (None, 1.0) or p.min_p not in (None, 0.0)
