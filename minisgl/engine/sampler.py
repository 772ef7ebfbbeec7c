"""From the logits of a batch to one token for each request that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Req, TokenLogprobs
from minisgl.distributed import DistributedCommunicator
from minisgl.kernel import sampling
from minisgl.utils.transfer import HostCopy, to_device

from .drawer import BatchDrawer, Drawer, TorchDrawer
from .sampling_plan import Draws, SamplingPlan

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

        `drawer` chooses tokens, PyTorch by default. If `logprobs_mode` is "processed", rows that
        draw and want logprobs are PyTorch's all the same: it has the probabilities.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._raw_logprobs = logprobs_mode == "raw"
        self._reference = TorchDrawer(device)
        self._drawer = BatchDrawer(self._reference, device) if drawer is None else drawer
        self._penalties = self._drawer.penalties(token_pool)
        self._plan = SamplingPlan.of([], vocab_size)
        self._comm = DistributedCommunicator()

    def attach(self, req: Req) -> None:
        """The token pool holds the tokens of `req` in its row; call it before it is sampled."""
        self._penalties.attach(req)

    def sample(
        self,
        logits: torch.Tensor,
        reqs: list[Req],
        rows: np.ndarray,
        positions: np.ndarray,
        sent: torch.Tensor | None = None,
    ) -> Sampled:
        """One token for each of `reqs` from its row of `logits [B, V]`.

        `rows [B]` are the requests' rows in the token pool, `positions [B]` those of the tokens
        to sample, and `sent` the same on the device, where they are there already: the pool holds
        all tokens before. Of a request only what never changes is read.
        """
        if reqs != self._plan.reqs:  # compared by identity
            self._plan = SamplingPlan.of(list(reqs), self._vocab_size)
        plan = self._plan
        work = self._process(logits, rows, positions)
        tokens = self._drawer.choose(work, plan, positions, sent)
        scores = None
        if plan.scored:
            index = self._tensor(np.array(plan.scored))
            scores = (logits if self._raw_logprobs else work)[index].float()
            if not self._raw_logprobs:
                self._redraw(work, positions, tokens, scores)
        self._comm.broadcast(tokens)  # ranks' logits may differ by what devices round differently
        if scores is None:
            return Sampled.plain(tokens, self._device)
        return self._with_logprobs(scores, tokens)

    def count(self, tokens: torch.Tensor, rows: np.ndarray) -> None:
        """The `tokens` that `sample` chose for `rows` stand: penalties count them from now on.

        Last in a launch: one that fails is tried again, and counts no token twice.
        """
        if self._plan.penalized.size:
            self._penalties.add(tokens, self._plan, rows)

    def _process(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Penalties, bias and min_tokens, on a float32 copy if any applies."""
        plan = self._plan
        bans = plan.bans(positions)
        if not (plan.penalized.size or plan.biases.rows.size or bans):
            return logits
        work = logits.to(torch.float32, copy=True)
        if plan.penalized.size:
            self._penalties.apply(work, plan, rows, positions)
        if plan.biases.rows.size:
            where, ids, values = map(self._tensor, plan.biases)
            work[where, ids] += values
        if bans:
            where, ids = self._tensor(np.array(bans).T).unbind()
            # Not `= float("-inf")`: a plain number would be copied to the device and waited for.
            work[where, ids] = work.new_full((), float("-inf"))
        return work

    def _redraw(
        self, work: torch.Tensor, positions: np.ndarray, tokens: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Apply temperature and filters to the `scores [s, V]` of the rows that draw.

        These are drawn once more, into `tokens [B]`, from just these probabilities: the token of
        another drawer could be one that they round to 0.
        """
        plan = self._plan
        again = np.isin(plan.draws.rows, plan.scored)
        if not again.any():
            return
        draws = Draws(*(values[again] for values in plan.draws))
        probs = self._reference.probs(work, *draws)
        keys = plan.seeds[again], positions[draws.rows], plan.choices[again]
        drawn = sampling.sample_from_probs(probs, self._reference.uniform(*keys))
        tokens[self._tensor(draws.rows)] = drawn
        places = np.flatnonzero(np.isin(plan.scored, draws.rows))  # both in the order of the rows
        scores[self._tensor(places)] = (probs / probs.sum(dim=-1, keepdim=True)).log()

    def _with_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> Sampled:
        """`logits [s, V]` are those of the rows that want logprobs."""
        scored, tops = self._plan.scored, self._plan.tops
        logprobs = torch.log_softmax(logits, dim=-1)
        own = tokens[self._tensor(np.array(scored))]
        ranked = sampling.ranked_logprobs(logprobs, own, max(tops))
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
