"""From the logits of a batch to one token for each request that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Req, TokenLogprobs
from minisgl.kernel import sampling
from minisgl.utils.transfer import HostCopy, to_device

from .drawer import Drawer, TorchDrawer
from .sampling_plan import SamplingPlan

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

    Parameters become vectors with one entry a row (`SamplingPlan`), which are kept for the next
    step: it mostly has the same requests. A stage is skipped when no row needs it, and rows never
    influence each other.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        token_pool: torch.Tensor,
        logprobs_mode: str,
        drawer: Drawer | None = None,
    ) -> None:
        """`token_pool [rows, max_len + 1]` int32 holds the tokens of every running request.

        `drawer` draws tokens, PyTorch's by default. If `logprobs_mode` is "processed" it only
        makes the random numbers: logprobs need the probabilities, which PyTorch has.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._token_pool = token_pool
        self._raw_logprobs = logprobs_mode == "raw"
        self._reference = TorchDrawer(device)
        self._drawer = self._reference if drawer is None else drawer
        self._plan = SamplingPlan.of([], vocab_size)

    def sample(
        self, logits: torch.Tensor, reqs: list[Req], rows: np.ndarray, positions: np.ndarray
    ) -> Sampled:
        """One token for each of `reqs` from its row of `logits [B, V]`.

        `rows [B]` are the requests' rows in the token pool, `positions [B]` those of the tokens
        to sample: the pool holds all tokens before. Of a request only what never changes is read.
        """
        if reqs != self._plan.reqs:  # compared by identity
            self._plan = SamplingPlan.of(list(reqs), self._vocab_size)
        raw = logits.float()
        work = self._process(raw, rows, positions)
        tokens, final = self._choose(work, positions)
        if not self._plan.scored:
            return Sampled.plain(tokens, self._device)
        return self._with_logprobs(raw if self._raw_logprobs else final, tokens)

    def _process(self, raw: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Penalties, bias and min_tokens, on a copy if any applies."""
        plan = self._plan
        bans = plan.bans(positions)
        if not (plan.penalized.size or plan.biases.rows.size or bans):
            return raw
        work = raw.clone()
        if plan.penalized.size:
            index = self._tensor(plan.penalized)
            work[index] = self._penalized(raw[index], rows, positions)
        if plan.biases.rows.size:
            where, ids, values = map(self._tensor, plan.biases)
            work[where, ids] += values
        if bans:
            where, ids = self._tensor(np.array(bans).T).unbind()
            # Not `= float("-inf")`: a plain number would be copied to the device and waited for.
            work[where, ids] = work.new_full((), float("-inf"))
        return work

    def _penalized(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        plan = self._plan
        rows, positions = rows[plan.penalized], positions[plan.penalized]
        width = int(positions.max())
        bounds = self._tensor(np.stack((rows, plan.prompt_lens, positions)))
        row, prompt_end, output_end = bounds.unsqueeze(2).unbind()
        tokens = self._token_pool[row.squeeze(1), :width].long()  # [c, width]
        column = torch.arange(width, device=self._device)
        in_prompt = column < prompt_end
        in_output = ~in_prompt & (column < output_end)
        return sampling.apply_penalties(
            logits,
            sampling.token_counts(tokens.where(in_prompt, -1), self._vocab_size),
            sampling.token_counts(tokens.where(in_output, -1), self._vocab_size),
            self._tensor(plan.penalties),
        )

    def _choose(
        self, logits: torch.Tensor, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of `logits [B, V]`, and the logits after temperature and filters.

        Only "processed" logprobs need the latter: else they are `logits`.
        """
        plan = self._plan
        draws, count = plan.draws, len(plan.draws.rows)
        if not count:
            return sampling.argmax(logits), logits
        uniform = self._drawer.uniform(plan.seeds, positions[draws.rows], plan.choices)
        if self._raw_logprobs:
            drawn, final = self._drawer.draw(logits, *draws, uniform), logits
        else:
            probs = self._reference.probs(logits, *draws)
            drawn, final = sampling.sample_from_probs(probs, uniform), logits.clone()
            final[self._tensor(draws.rows)] = (probs / probs.sum(dim=-1, keepdim=True)).log()
        if count == len(plan.reqs):
            return drawn, final
        tokens = sampling.argmax(logits)
        tokens[self._tensor(draws.rows)] = drawn
        return tokens, final

    def _with_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> Sampled:
        scored, tops = self._plan.scored, self._plan.tops
        index = self._tensor(np.array(scored))
        logprobs = torch.log_softmax(logits[index], dim=-1)
        ranked = sampling.ranked_logprobs(logprobs, tokens[index], max(tops))
        return Sampled(tokens, scored, tops, HostCopy([tokens, *ranked], self._device))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)


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
