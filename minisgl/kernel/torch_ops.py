"""The reference of every op, in plain PyTorch.

The order of operations is Hugging Face's, so that in float32 RMSNorm and RoPE differ from
`transformers` by exactly 0.0. Faster versions are tested against these. Shapes use the
alphabet of docs/shapes.md: T tokens, B requests, Hq and Hk heads, D head size, I inner size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = [
    "apply_rope_inplace",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "grouped_experts",
    "indexing",
    "rmsnorm",
    "rmsnorm_inplace",
    "silu_and_mul",
    "store_kv",
    "topk_softmax",
]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, statistics in float32.

    `x [..., size]`, `weight [size]` of the same dtype; returns a new tensor like `x`.
    Source: Zhang and Sennrich 2019, with Llama's rounding to the input dtype before the weight.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    # In place where the tensor is ours: large temporaries cost more than the arithmetic.
    wide = wide * scale if wide is x else wide.mul_(scale)
    return wide.to(x.dtype).mul_(weight)


def rmsnorm_inplace(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """`x = rmsnorm(x)`; `x` may be a view, such as the heads of a merged projection."""
    x.copy_(rmsnorm(x, weight, eps))


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: `residual += x`, then `x = rmsnorm(residual)`. Both `[T, hidden]`."""
    # `residual + x` in the order Hugging Face adds; addition commutes bit for bit.
    residual.add_(x)
    x.copy_(rmsnorm(residual, weight, eps))


def apply_rope_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate query and key by their positions, in place, pairing the two halves (NeoX).

    `positions [T]` integers, `query [T, Hq * D]` or `[T, Hq, D]` (key likewise),
    `cos_sin_cache [max_pos, rotary_dim]` float32: cosines, then sines. Dimensions of a head
    beyond `rotary_dim` are left alone. Source: Su et al. 2021 (RoFormer), GPT-NeoX layout.
    """
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)  # [T, rotary_dim / 2] each
    # Hugging Face rounds the table to the activations' dtype before multiplying.
    cos = cos.to(query.dtype).unsqueeze(1)
    sin = sin.to(query.dtype).unsqueeze(1)
    half = cos.shape[-1]
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :I]) * x[..., I:]` for `x [..., 2 I]`: the SwiGLU of Shazeer 2020."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :I]) * x[..., I:]` with the exact (erf) GELU."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x[..., :I]) * x[..., I:]` with the tanh approximation of GELU."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def indexing(
    weight: torch.Tensor, ids: torch.Tensor, vocab_range: tuple[int, int] | None = None
) -> torch.Tensor:
    """Rows `ids [T]` of `weight [n, hidden]`, as `[T, hidden]`.

    With `vocab_range = (start, length)`, `weight` holds the vocabulary's rows
    `start .. start + length - 1`, and ids outside of them give zeros.
    """
    if vocab_range is None:
        return F.embedding(ids, weight)
    start, length = vocab_range
    if length == 0:  # a rank beyond the vocabulary has no row to look up
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    local = ids - start
    outside = (local < 0) | (local >= length)
    rows = F.embedding(local.masked_fill(outside, 0), weight)
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


def store_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_loc: torch.Tensor,
) -> None:
    """Write `k, v [T, Hk, D]` to the slots `out_loc [T]` of `[slots, Hk, D]` caches."""
    k_cache.index_copy_(0, out_loc, k)
    v_cache.index_copy_(0, out_loc, v)


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts: softmax over all experts in float32, then the top k.

    `router_logits [T, E]` to weights `[T, k]` of the same dtype and ids `[T, k]` int64;
    `renormalize` makes the k weights sum to 1. Source: Qwen3-MoE (`norm_topk_prob`).
    """
    probs = torch.softmax(router_logits, dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(probs, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), ids


def grouped_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    first_expert: int = 0,
    num_experts: int | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of `weight * down(silu(gate) * up)`.

    `x [T, hidden]`, `gate_up [E, 2 I, hidden]`, `down [E, hidden, I]`, weights and ids `[T, k]`;
    returns `[T, hidden]`. Tokens are sorted by expert: one GEMM for each expert that has any.
    The experts given are those from id `first_expert` on, of `num_experts` (None: all there are);
    what others add is left out.
    """
    top_k = topk_ids.shape[1]
    order = topk_ids.flatten().argsort(stable=True)  # [T * k], pairs grouped by expert
    tokens = order // top_k
    scale = topk_weights.flatten()[order].unsqueeze(-1)
    end = first_expert + gate_up.shape[0]
    counts = torch.bincount(topk_ids.flatten(), minlength=num_experts or end)[:end].tolist()
    out = torch.zeros_like(x)
    start = sum(counts[:first_expert])
    for expert, count in enumerate(counts[first_expert:]):
        if count == 0:
            continue
        rows = slice(start, start + count)
        start += count
        hidden = silu_and_mul(F.linear(x[tokens[rows]], gate_up[expert]))
        out.index_add_(0, tokens[rows], F.linear(hidden, down[expert]) * scale[rows])
    return out
