"""The reference of attention, by `scaled_dot_product_attention` over gathered keys and values.

Hq query heads share Hk KV heads in groups of G = Hq / Hk (Ainslie et al. 2023). At decode the
group is folded into the query length: one pass over a KV head's keys serves all its queries,
several times faster in torch than `enable_gqa`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["decode_attention", "prefill_attention"]

_SCORE_BYTES = 1 << 28
"""Of scores at once: with a mask and grouped heads no kernel of torch's for CUDA goes without a
matrix of them, and that of a long prompt's late chunk would be tens of GiB."""


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One query token for each of B requests: `q [B, Hq, D]`, `k, v [B, L, Hk, D]`.

    `mask [B, 1, 1, L]` is added to the scores (0 or -inf), None when all L keys count.
    Returns `[B, Hq, D]`.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))  # [B, Hk, G, D]
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.flatten(1, 2)


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The n last tokens of one request: `q [n, Hq, D]`, `k, v [L, Hk, D]`.

    `mask [n, L]` is added to the scores; None means causal with n = L. Returns `[n, Hq, D]`.
    """
    if mask is not None and (rows := _rows_at_once(q, k)) < q.shape[0]:
        pieces = zip(q.split(rows), mask.split(rows), strict=True)
        return torch.cat([prefill_attention(piece, k, v, own) for piece, own in pieces])
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _rows_at_once(q: torch.Tensor, k: torch.Tensor) -> int:
    """How many queries' float32 scores stay within `_SCORE_BYTES`; all on a CPU, whose kernel keeps
    none, and else one at least."""
    if not q.is_cuda:
        return q.shape[0]
    return max(1, _SCORE_BYTES // (q.shape[1] * k.shape[0] * torch.float32.itemsize))
