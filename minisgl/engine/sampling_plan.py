"""What the requests of a batch ask of the sampler, as vectors with one entry a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minisgl.core import Req, SamplingParams

__all__ = ["Biases", "Draws", "SamplingPlan", "has_penalties"]

_Penalties = tuple[float, float, float]


class Draws(NamedTuple):
    """The rows that draw their token `[b]` int64, and how, as `RowDrawer.draw` takes it."""

    rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


class Biases(NamedTuple):
    """What is added `[d]` float32 to which logit of which row `[d]` int64."""

    rows: np.ndarray
    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class SamplingPlan:
    """All that is the same in each step of a batch; a row is a place in `reqs`.

    Made of what never changes in a request, so it holds for as long as the batch has the same
    requests: a decoding batch mostly does, for many steps.
    """

    reqs: list[Req]
    draws: Draws
    seeds: np.ndarray
    """Of the rows that draw `[b]` int64."""
    choices: np.ndarray
    """The same."""
    penalized: np.ndarray
    """Rows with penalties `[c]` int64."""
    penalties: np.ndarray
    """Of these: repetition, presence, frequency `[c, 3]` float32."""
    prompt_lens: np.ndarray
    """Of these, too: `[c]` int64."""
    biases: Biases
    banning: list[int]
    """Rows with `min_tokens`."""
    scored: list[int]
    """Rows that want logprobs."""
    tops: list[int]
    """How many alternatives each of these wants."""

    @classmethod
    def of(cls, reqs: list[Req], vocab_size: int) -> SamplingPlan:
        """The plan for requests with resolved parameters."""
        params = [req.params for req in reqs]
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        penalized = [i for i, p in enumerate(params) if has_penalties(p)]
        biases = [(i, *item) for i, p in enumerate(params) for item in p.logit_bias.items()]
        asked = [(i, p.logprobs) for i, p in enumerate(params)]
        return cls(
            reqs=reqs,
            draws=_draws(drawn, [params[i] for i in drawn], vocab_size),
            seeds=_ints([reqs[i].seed for i in drawn]),
            choices=_ints([reqs[i].choice for i in drawn]),
            penalized=_ints(penalized),
            penalties=_floats([_penalties(params[i]) for i in penalized]),
            prompt_lens=_ints([reqs[i].prompt_len for i in penalized]),
            biases=Biases(
                _ints([row for row, _, _ in biases]),
                _ints([token for _, token, _ in biases]),
                _floats([value for _, _, value in biases]),
            ),
            banning=[i for i, p in enumerate(params) if p.min_tokens],
            scored=[i for i, top in asked if top is not None],
            tops=[top for _, top in asked if top is not None],
        )

    def bans(self, positions: np.ndarray) -> list[tuple[int, int]]:
        """Row and token id of what `min_tokens` forbids at `positions [B]`: every end, in rows
        that are shorter."""
        return [
            (i, token)
            for i in self.banning
            if positions[i] - self.reqs[i].prompt_len < self.reqs[i].params.min_tokens
            for token in sorted({*self.reqs[i].eos_ids, *self.reqs[i].params.stop_token_ids})
        ]


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request's logits depend on the tokens that it has."""
    return _penalties(params) != (1.0, 0.0, 0.0)


def _penalties(p: SamplingParams) -> _Penalties:
    return p.repetition_penalty or 1.0, p.presence_penalty, p.frequency_penalty


def _draws(rows: list[int], params: list[SamplingParams], vocab_size: int) -> Draws:
    every = vocab_size
    return Draws(
        _ints(rows),
        _floats([p.temperature or 1.0 for p in params]),
        _ints([min(p.top_k, every) if p.top_k and p.top_k > 0 else every for p in params]),
        _floats([p.top_p if p.top_p is not None else 1.0 for p in params]),
        _floats([p.min_p or 0.0 for p in params]),
    )


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[float] | Sequence[_Penalties]) -> np.ndarray:
    return np.array(values, dtype=np.float32)
