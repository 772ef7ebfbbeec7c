"""Weights in blocks: GGUF's formats, to and from float32, and the ops' references on them.

A row of K weights is K / n blocks, one after another; each block has its own scales (f16, little
endian) and n small integers q. Bytes of a block, in this order:

    Q8_0   32   d f16 | q 32 x i8                                          w = d q
    Q4_0   32   d f16 | 16 bytes: q of w[j] low, of w[j + 16] high         w = d (q - 8)
    Q4_1   32   d f16 | m f16 | 16 bytes as in Q4_0                        w = d q + m
    Q4_K  256   d f16 | e f16 | 12 bytes: s, t | 128 bytes                 w = d s q - e t
    Q6_K  256   128 bytes | 64 bytes | s 16 x i8 | d f16                   w = d s (q - 32)

Q4_K has 8 groups of 32 weights, each with a scale s and an offset t of 6 bits:

    byte    0 .. 3             4 .. 7             8 .. 11
            s[i] | s[i+4]' 64  t[i] | t[i+4]' 64  s[i+4] low 4 bits | t[i+4] low 4 bits, times 16
            (' the upper 2 bits; i = 0 .. 3)

and 32 bytes for two groups at a time: the low halves are the first group. Q6_K has 16 groups of
16 weights with a scale each. Its bytes are in two halves of 128 weights; of one, 64 bytes hold
the low 4 bits of weights 0 .. 63 (low halves) and 64 .. 127 (high), and 32 bytes the upper 2
bits: byte i has those of weights i, i + 32, i + 64, i + 96, from its lowest bits up.

Source of the layouts: the `gguf` package, which tests compare with, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["BLOCKS", "BlockFormat", "dequantize", "quant_indexing", "quant_linear", "quantize"]


class BlockFormat(NamedTuple):
    """Every `values` consecutive weights of a row take `nbytes` bytes."""

    values: int
    nbytes: int


BLOCKS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(32, 34),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q4_K": BlockFormat(256, 144),
    "Q6_K": BlockFormat(256, 210),
}

_PIECE = 1 << 20
"""Weights worked on at once: 4 MiB in float32, so that a few of them stay in the cache."""


def dequantize(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """`blocks [rows, bytes of a row]` uint8 of format `kind` to float32 `[rows, K]`."""
    form = _form(kind)
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % form.nbytes:
        raise ValueError(
            f"{kind} blocks must be uint8 [rows, n * {form.nbytes}], not "
            f"{blocks.dtype} {tuple(blocks.shape)}"
        )
    flat = blocks.reshape(-1, form.nbytes)
    return _DECODE[kind](flat).view(blocks.shape[0], -1)


def quantize(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """`weight [rows, K]`, floating, to blocks uint8 `[rows, bytes of a row]` of Q8_0 or Q4_1.

    Deterministic. Raises `ValueError` for another format, a K that blocks do not divide, and
    weights that are not finite or so large that their scale is no finite f16.
    """
    if kind not in _ENCODE:
        raise ValueError(f"Can't quantize to {kind!r}: choose from {', '.join(_ENCODE)}")
    form = _form(kind)
    if weight.dim() != 2 or weight.shape[1] % form.values:
        raise ValueError(
            f"{kind} needs [rows, K] with a K that {form.values} divides, not {tuple(weight.shape)}"
        )
    rows, width = weight.shape
    out = torch.empty(rows, width // form.values * form.nbytes, dtype=torch.uint8)
    step = max(1, _PIECE // max(1, width))
    for start in range(0, rows, step):
        piece = weight[start : start + step].float()
        blocks = out[start : start + step].view(-1, form.nbytes)
        _ENCODE[kind](piece.reshape(-1, form.values), blocks)
    return out


def quant_linear(x: torch.Tensor, blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """`x [T, K]` times the weights of `blocks [out, bytes of a row]` transposed: `[T, out]`.

    The weights are dequantized to x's dtype, some rows at a time.
    """
    rows = blocks.shape[0]
    out = x.new_empty(x.shape[0], rows)
    step = max(1, _PIECE // max(1, x.shape[1]))
    for start in range(0, rows, step):
        weight = dequantize(blocks[start : start + step], kind)
        out[:, start : start + step] = F.linear(x, weight.to(x.dtype))
    return out


def quant_indexing(
    blocks: torch.Tensor, kind: str, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids [T]` of the weights of `blocks [n, bytes of a row]`, as `[T, K]` in `dtype`."""
    return dequantize(blocks[ids], kind).to(dtype)


def _form(kind: str) -> BlockFormat:
    if kind not in BLOCKS:
        raise ValueError(f"{kind!r} is no block format; there are {', '.join(BLOCKS)}")
    return BLOCKS[kind]


def _f16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The f16 at byte `start` of each block `[n, bytes]`, as float32 `[n, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Bytes `[..., m]` to the low, then the high halves: `[..., 2 m]`."""
    data = data.contiguous()  # on pieces of rows, both operations take twice as long
    return torch.cat((data & 15, data >> 4), dim=-1)


def _decode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_f16(blocks, 0))


def _decode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_f16(blocks, 0))


def _decode_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_f16(blocks, 0)).add_(_f16(blocks, 2))


def _decode_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    scale = (_f16(blocks, 0) * scales).unsqueeze(-1)  # [n, 8, 1]
    offset = (_f16(blocks, 2) * offsets).unsqueeze(-1)
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return q.float().mul_(scale).sub_(offset)


def _decode_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))  # [n, 2, 128]
    high = blocks[:, 128:192].unflatten(1, (2, 32))  # [n, 2, 32]
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    scales = blocks[:, 192:208].view(torch.int8)
    scale = (_f16(blocks, 208) * scales).unsqueeze(-1)  # [n, 16, 1]
    return (low | high << 4).view(-1, 16, 16).float().sub_(32).mul_(scale)


_DECODE = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q4_K": _decode_q4_k,
    "Q6_K": _decode_q6_k,
}


def _store(values: torch.Tensor, blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Write `values [n, 1]` as f16 at byte `start` of the blocks; returns what was stored."""
    stored = values.half()
    if not bool(stored.isfinite().all()):
        raise ValueError(
            "weights that are not finite, or too large for a scale in f16, can't be quantized"
        )
    blocks[:, start : start + 2] = stored.view(torch.uint8)
    return stored.float()


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 of a scale that is 0 or nearly so, for which all q then become equal."""
    return scale.reciprocal().nan_to_num_(posinf=0.0, neginf=0.0)


def _encode_q8_0(weight: torch.Tensor, blocks: torch.Tensor) -> None:
    """`weight [n, 32]` into `blocks [n, 34]`: the largest weight becomes 127 or -127."""
    largest = weight.abs().amax(dim=1, keepdim=True)  # five times as fast as `aminmax`
    inverse = _inverse(_store(largest.div_(127), blocks, 0))
    # Rounding a tiny scale to f16 can make it smaller by much: hence the clamp.
    q = (weight * inverse).round_().clamp_(-127, 127)
    blocks[:, 2:].view(torch.int8).copy_(q)


_TRIALS = ((15.0, 0.0), (15.0, -0.25), (15.5, 0.0), (14.0, 0.0))
"""Places (steps, shift) of a block's smallest and largest weight on the scale 0 .. 15: at `shift`
and at `shift + steps`.

The first and the last give blocks back that were so already. The others were chosen one after
another by what they added, on numbers drawn from normal, Laplace and Student distributions:
together they leave 0.80 of the square error of the plain way, which is the first without a fit;
90 places that were tried leave 0.79.
"""


def _encode_q4_1(weight: torch.Tensor, blocks: torch.Tensor) -> None:
    """`weight [n, 32]` into `blocks [n, 20]`: each block's best line through a few tried.

    Given the integers q, the line d q + m of least square error is the regression of the weights
    on them. With c the weights less their mean: d = cq / (qq - q^2 / 32), where ab is the sum of
    the products and q that of the integers, and the error is cc - d cq. So each trial rounds to
    some integers, and the line with the largest d cq is kept, then fitted once more to the
    integers that it gives itself.
    """
    mean = weight.mean(dim=1, keepdim=True)
    centred = weight - mean
    low = centred.amin(dim=1, keepdim=True)
    unit = _inverse(centred.amax(dim=1, keepdim=True) - low)
    best = _Line(torch.zeros_like(mean), torch.zeros_like(mean), torch.full_like(mean, -1))
    for steps, shift in _TRIALS:
        inverse = unit * steps
        line = _fit(centred, _round_q4(centred, inverse, shift - low * inverse))
        better = line.gain > best.gain
        best = _Line(*(torch.where(better, a, b) for a, b in zip(line, best, strict=True)))
    best = _fit(centred, _round_q4(centred, _inverse(best.scale), best.centre))
    scale = _store(best.scale, blocks, 0)
    inverse = _inverse(scale)
    # What is stored is rounded, so m follows from the stored d, and q from both.
    q = _round_q4(centred, inverse, best.centre)
    offset = _store(mean - scale * q.mean(dim=1, keepdim=True), blocks, 2)
    q = _round_q4(weight, inverse, -offset * inverse).to(torch.uint8)
    torch.bitwise_or(q[:, :16], q[:, 16:] << 4, out=blocks[:, 4:])


class _Line(NamedTuple):
    """Of each block `[n, 1]`: d, the mean of q, and by how much the line lowers the error."""

    scale: torch.Tensor
    centre: torch.Tensor
    gain: torch.Tensor


def _fit(centred: torch.Tensor, q: torch.Tensor) -> _Line:
    """The best line for the integers `q [n, 32]`, which are overwritten."""
    centre = q.mean(dim=1, keepdim=True)
    product = (centred * q).sum(dim=1, keepdim=True)
    spread = q.sub_(centre).square_().sum(dim=1, keepdim=True)
    scale = product / spread.clamp_(min=1e-6)  # 0 if all q are equal
    return _Line(scale, centre, scale * product)


def _round_q4(weight: torch.Tensor, inverse: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """`weight [n, 32]` times `inverse` plus `offset`, both `[n, 1]`, as integers of 4 bits."""
    return torch.addcmul(offset, weight, inverse).round_().clamp_(0, 15)


_ENCODE = {"Q8_0": _encode_q8_0, "Q4_1": _encode_q4_1}
