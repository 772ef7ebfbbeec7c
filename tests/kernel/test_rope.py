"""Triton's RoPE, alone and fused, against the sequence of references of `torch_ops`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from minisgl.kernel import torch_ops
from tests.helpers import assert_close

pytest.importorskip("triton")
from minisgl.kernel.triton.rope import apply_rope_inplace, qk_norm_rope_store  # noqa: E402
from minisgl.kernel.triton.runtime import INTERPRETED  # noqa: E402

MAX_POSITION = 64
# Without the norm nothing is off. With it the sum of squares is in another order, and a value near
# a rounding boundary goes to its neighbour: some units in the last place at 8, as normed values
# times weights of up to 1.5 are. The interpreter cuts bfloat16 off instead of rounding it.
ATOL = {torch.float32: 4e-6, torch.float16: 2**-6, torch.bfloat16: 2**-2 if INTERPRETED else 2**-3}
DTYPES = list(ATOL)


class Heads(NamedTuple):
    """Heads of a model, and how much of each is rotated."""

    q: int
    kv: int
    size: int
    rotary: int

    @property
    def width(self) -> int:
        return (self.q + 2 * self.kv) * self.size


def make_table(device: torch.device, rotary: int) -> torch.Tensor:
    """`[MAX_POSITION, rotary]`: the usual table, of base 10,000."""
    angles = torch.outer(torch.arange(MAX_POSITION), 1e4 ** -torch.arange(0, 1, 2 / rotary))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def exact(dtype: torch.dtype) -> bool:
    """Whether a rotation has the reference's bits; the interpreter's bfloat16 hasn't."""
    return not (INTERPRETED and dtype == torch.bfloat16)


def check_rope(device: torch.device, tokens: int, heads: Heads, dtype: torch.dtype) -> None:
    """Query and key are views into one projection, one flat and one by heads."""
    torch.manual_seed(tokens)
    merged = torch.randn(tokens, heads.width, dtype=torch.float32).to(device, dtype)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    table = make_table(device, heads.rotary)
    expected = merged.clone()
    for tensor, rope in ((merged, apply_rope_inplace), (expected, torch_ops.apply_rope_inplace)):
        q, k, _ = tensor.split([n * heads.size for n in (heads.q, heads.kv, heads.kv)], dim=1)
        rope(positions, q, k.unflatten(1, (heads.kv, heads.size)), heads.size, table)
    if exact(dtype):
        assert torch.equal(merged, expected)
    else:
        assert_close(merged, expected, ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(device: torch.device, dtype: torch.dtype) -> None:
    check_rope(device, 5, Heads(3, 2, 16, 16), dtype)


@pytest.mark.parametrize("heads", [Heads(10, 1, 80, 80), Heads(2, 1, 24, 12), Heads(1, 9, 6, 2)])
def test_rope_of_other_heads(device: torch.device, heads: Heads) -> None:
    check_rope(device, 3, heads, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_heads", [16, 40])
def test_rope_of_qwen3(device: torch.device, q_heads: int, dtype: torch.dtype) -> None:
    check_rope(device, 4099, Heads(q_heads, 8, 128, 128), dtype)


def test_rope_takes_int32_and_no_tokens(device: torch.device) -> None:
    table = make_table(device, 8)
    q, k = torch.randn(2, 16, device=device), torch.randn(2, 8, device=device)
    expected = q.clone(), k.clone()
    positions = torch.tensor([7, 63], dtype=torch.int32, device=device)
    torch_ops.apply_rope_inplace(positions, *expected, 8, table)
    apply_rope_inplace(positions, q, k, 8, table)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    apply_rope_inplace(positions[:0], q[:0], k[:0], 8, table)


def test_rope_rejects_what_it_cannot_take(device: torch.device) -> None:
    table = make_table(device, 8)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    q, k = torch.randn(2, 16, device=device), torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"key must be \[2, .* shape \(1, 8\)"):
        apply_rope_inplace(positions, q, k[:1], 8, table)
    with pytest.raises(ValueError, match="key is .* torch.float16"):
        apply_rope_inplace(positions, q, k.half(), 8, table)
    with pytest.raises(ValueError, match=r"head size of 4: shape \(64, 8\)"):
        apply_rope_inplace(positions, q, k, 4, table)
    with pytest.raises(ValueError, match="positions"):
        apply_rope_inplace(positions.float(), q, k, 8, table)
    with pytest.raises(ValueError, match="cos_sin_cache must be float32"):
        apply_rope_inplace(positions, q, k, 8, table.half())


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    caches: torch.Tensor,
    table: torch.Tensor,
    heads: Heads,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The ops one after another; returns qkv with only its query heads changed."""
    result = qkv.clone()
    q, k, v = result.split([n * heads.size for n in (heads.q, heads.kv, heads.kv)], dim=1)
    q, k, v = (x.unflatten(1, (-1, heads.size)) for x in (q, k.clone(), v))
    if weights is not None:
        torch_ops.rmsnorm_inplace(q, weights[0], 1e-6)
        torch_ops.rmsnorm_inplace(k, weights[1], 1e-6)
    torch_ops.apply_rope_inplace(positions, q, k, heads.size, table)
    torch_ops.store_kv(caches[0], caches[1], k, v, out_loc)
    return result


def check_fused(
    device: torch.device, tokens: int, heads: Heads, dtype: torch.dtype, norm: bool
) -> None:
    """The last two tokens are padding: they go to the last slot, of which nothing is asked."""
    torch.manual_seed(tokens)
    wide = torch.randn(tokens, heads.width + 8).to(device, dtype)
    qkv = wide[:, 8:]  # with its own row stride
    slots = tokens + 5
    # Interleaved, so that slots of K and V have a stride of their own; poisoned.
    caches = torch.full((slots, 2, heads.kv, heads.size), float("nan"), dtype=dtype, device=device)
    k_cache, v_cache = caches.unbind(1)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    out_loc = torch.randperm(slots - 1, device=device)[:tokens]
    out_loc[-2:] = slots - 1
    table = make_table(device, heads.rotary)
    weights = (torch.rand(2, heads.size) + 0.5).to(device, dtype) if norm else None
    theirs = caches.clone().transpose(0, 1).contiguous()
    expected = reference(qkv, positions, out_loc, theirs, table, heads, weights)
    before = wide.clone()
    qkv_args = (qkv, positions, out_loc, k_cache, v_cache, table, heads.q, heads.kv, heads.size)
    if weights is None:
        qk_norm_rope_store(*qkv_args)
    else:
        qk_norm_rope_store(*qkv_args, weights[0], weights[1], 1e-6)

    atol = ATOL[dtype] if norm or not exact(dtype) else 0.0
    assert_close(qkv, expected, atol, "query")
    q_width = heads.q * heads.size
    assert torch.equal(qkv[:, q_width:], before[:, 8 + q_width :])
    assert torch.equal(wide[:, :8], before[:, :8])
    real = out_loc[:-2]
    assert_close(k_cache[real], theirs[0][real], atol, "key")
    assert torch.equal(v_cache[real], theirs[1][real])
    untouched = torch.ones(slots, dtype=torch.bool)
    untouched[out_loc.cpu()] = False
    assert caches[untouched.to(device)].isnan().all()
    assert caches[-1].isfinite().all()  # one of the padding tokens, or some of both


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_fused(device: torch.device, dtype: torch.dtype, norm: bool) -> None:
    check_fused(device, 6, Heads(4, 2, 16, 16), dtype, norm)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 1, 80, 80),  # no power of two
        Heads(11, 9, 4, 4),  # no multiples of a program's 8 heads
        Heads(3, 3, 24, 16),  # partial rotation, 8 dimensions left
        Heads(2, 1, 22, 6),  # 16 left, and a half of 3
    ],
)
def test_fused_of_other_heads(device: torch.device, heads: Heads, norm: bool) -> None:
    check_fused(device, 3, heads, torch.float32, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 256, 4099])
@pytest.mark.parametrize(
    "heads", [Heads(16, 8, 128, 128), Heads(40, 8, 128, 128), Heads(5, 1, 256, 64)]
)
def test_fused_of_qwen3(
    device: torch.device, heads: Heads, tokens: int, dtype: torch.dtype
) -> None:
    check_fused(device, tokens, heads, dtype, norm=True)
    check_fused(device, tokens, heads, dtype, norm=False)


@pytest.mark.gpu
def test_fused_writes_slots_beyond_2_31_elements(device: torch.device) -> None:
    heads = Heads(2, 8, 128, 128)
    slots = 2**31 // (8 * 128) + 2
    qkv = torch.randn(1, heads.width, device=device, dtype=torch.bfloat16)
    value = qkv[:, -8 * 128 :].clone().view(8, 128)
    k_cache = torch.empty(slots, 8, 128, device=device, dtype=torch.bfloat16)
    v_cache = torch.empty_like(k_cache)
    last = torch.tensor([slots - 1], device=device)
    table = make_table(device, 128)
    qk_norm_rope_store(qkv, last * 0, last, k_cache, v_cache, table, 2, 8, 128)
    assert torch.equal(v_cache[-1], value)


def test_fused_rejects_what_it_cannot_take(device: torch.device) -> None:
    heads = Heads(2, 1, 8, 8)
    qkv = torch.randn(3, heads.width, device=device)
    index = torch.arange(3, device=device)
    cache, weight = torch.zeros(4, 1, 8, device=device), torch.ones(8, device=device)
    table = make_table(device, 8)

    def call(**changes: object) -> None:
        arguments = {
            "qkv": qkv, "positions": index, "out_loc": index, "k_cache": cache, "v_cache": cache,
            "cos_sin_cache": table, "num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        }  # fmt: skip
        qk_norm_rope_store(**{**arguments, **changes})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"qkv must be \[T, 40\] .* not \(3, 32\)"):
        call(num_qo_heads=3)
    with pytest.raises(ValueError, match="torch.float64$"):
        call(qkv=qkv.double())
    with pytest.raises(ValueError, match=r"v_cache must be \[slots, 1, 8\] .* \(4, 8\)"):
        call(v_cache=cache[:, 0])
    with pytest.raises(ValueError, match="torch.float16"):
        call(k_cache=cache.half())
    with pytest.raises(ValueError, match="out_loc must be .* torch.int32"):
        call(out_loc=index.int())
    with pytest.raises(ValueError, match=r"positions must be contiguous \[3\]"):
        call(positions=index[:2])
    with pytest.raises(ValueError, match="both"):
        call(q_weight=weight)
    with pytest.raises(ValueError, match=r"k_weight must be contiguous \[8\]"):
        call(q_weight=weight, k_weight=weight[:4])
    with pytest.raises(ValueError, match="at most 256"):
        call(head_dim=258)
    call(
        qkv=qkv[:0], positions=index[:0], out_loc=index[:0], q_weight=weight, k_weight=weight
    )  # nothing to do
