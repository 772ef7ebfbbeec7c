"""Choosing the next token: penalties, filters, random numbers, log-probabilities.

Every function works on rows that do not influence each other. The order of processors is
vLLM's: penalties, bias, (min_tokens), temperature, then top-k, top-p, min-p.
"""

from __future__ import annotations

import torch

__all__ = [
    "apply_penalties",
    "argmax",
    "filter_probs",
    "philox_uniform",
    "ranked_logprobs",
    "sample_from_probs",
    "token_counts",
]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_LARGEST = 1e30
_PIECE = 128


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row `[B, V]`, the lowest id among equals: `[B]` int64."""
    if not logits.is_cuda:  # there, torch promises the first of equal values
        if logits.shape[1] % _PIECE:
            return logits.argmax(dim=-1)
        # The largest of each piece first: amax is vectorized on the CPU, argmax is not.
        pieces = logits.unflatten(1, (-1, _PIECE))
        best_piece: torch.Tensor = pieces.amax(dim=-1).argmax(dim=-1)
        rows = torch.arange(logits.shape[0])
        first: torch.Tensor = pieces[rows, best_piece].argmax(dim=-1)
        return best_piece * _PIECE + first
    best = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)


def token_counts(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each id occurs in each row of `tokens [B, L]` (padded with -1): `[B, V]` int32."""
    counts = torch.zeros((tokens.shape[0], vocab_size + 1), dtype=torch.int32, device=tokens.device)
    index = torch.where(tokens < 0, vocab_size, tokens)  # padding goes to an extra column
    counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
    return counts[:, :vocab_size]


def apply_penalties(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    penalties: torch.Tensor,
) -> torch.Tensor:
    """Logits `[B, V]` float32 after the penalties `[B, 3]`: repetition, presence, frequency.

    Repetition (Keskar et al. 2019) looks at prompt and output: it divides positive logits and
    multiplies negative ones. Presence and frequency (OpenAI) look at the output only.
    """
    repetition, presence, frequency = (p.unsqueeze(1) for p in penalties.unbind(1))
    seen = (prompt_counts + output_counts) > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, scaled, logits)
    logits = logits - presence * (output_counts > 0) - frequency * output_counts
    # A repetition penalty near 0 leaves no float32; dividing by a temperature must stay finite.
    return logits.clamp(-_LARGEST, _LARGEST)


def filter_probs(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Probabilities `[B, V]` float32 with what the filters drop at 0, not renormalized.

    `logits [B, V]` are divided by temperature already. `top_k [B]` int64 (at least V: off)
    keeps the k largest, the lowest ids among equals; `top_p [B]` keeps the fewest of those
    that reach it (Holtzman et al. 2019); `min_p [B]` keeps what is at least that fraction of
    the largest.
    """
    probs, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    probs = probs.masked_fill(rank >= top_k.unsqueeze(1), 0.0)
    wide = probs.double()
    before = wide.cumsum(dim=-1) - wide
    enough = before >= top_p.double().unsqueeze(1) * wide.sum(dim=-1, keepdim=True)
    enough[:, 0] = False  # rounding must never drop the most likely token
    probs = probs.masked_fill(enough, 0.0)
    probs = probs.masked_fill(probs < min_p.unsqueeze(1) * probs[:, :1], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, probs)


def sample_from_probs(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: `probs [B, V]` (any sum), `uniform [B]` in [0, 1).

    The token is the first whose cumulative probability exceeds `uniform * sum`: `[B]` int64.
    It never has probability 0.
    """
    cumulative = probs.double().cumsum(dim=-1)
    target = uniform.double() * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    # uniform * sum can round up to the sum: then it is the last token with any probability.
    ids = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, ids, 0).amax(dim=-1)
    return torch.minimum(tokens, last)


def philox_uniform(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """A uniform number in [0, 1) for each (seed, position, choice), all `[B]` int64.

    Philox4x32-10 (Salmon et al. 2011) with the seed as key and (position, choice) as counter,
    in integer arithmetic that is the same on every device; 53 bits of it as float64.
    """
    words = philox4x32(
        (positions & _LOW, positions >> 32 & _LOW, choices & _LOW, torch.zeros_like(choices)),
        (seeds & _LOW, seeds >> 32 & _LOW),
    )
    mantissa = (words[0] << 21) ^ (words[1] >> 11)
    return mantissa.double() * 2.0**-53


Words = tuple[torch.Tensor, ...]


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds of Philox4x32: four counter words and two key words, uint32 in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of `a * constant`, by halves so that int64 does not overflow."""
    upper, lower = a * (constant >> 16), a * (constant & 0xFFFF)  # below 2^48 each
    middle = (upper & 0xFFFF) << 16
    total = lower + middle  # below 2^49
    return ((upper >> 16) + (total >> 32)) & _LOW, total & _LOW


def ranked_logprobs(
    logprobs: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For rows of `logprobs [N, V]` and their `tokens [N]`: `(own [N], rank [N], top values
    [N, top], top ids [N, top])`; rank 1 is the most likely. `top` is cut to V."""
    top = min(top, logprobs.shape[1])
    own = logprobs.gather(1, tokens.unsqueeze(1))
    rank = (logprobs > own).sum(dim=-1) + 1
    values, ids = logprobs.topk(top, dim=-1) if top else (own[:, :0], tokens.unsqueeze(1)[:, :0])
    return own.squeeze(1), rank, values, ids
