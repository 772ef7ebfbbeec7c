"""What `minisgl bench kernel` times: a function for each kernel, and a line for each with sizes.

A function makes random inputs and returns `Work`: a call on them, and the bytes and operations
that the call can't do without. Each is read or written once, however often a kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minisgl.models import ModelConfig
from minisgl.utils import div_ceil

from .workloads import reference_workload

__all__ = ["Case", "Draw", "Kernel", "Work", "decode_lengths", "kernel_cases", "sized_kernels"]

PAGE_SIZE = 16
MAX_POSITION = 4096


class Work(NamedTuple):
    """One call of a kernel, and what it has to move and to compute."""

    call: Callable[[], object]
    bytes: int
    flops: int = 0


class Case(NamedTuple):
    """A kernel at some sizes; `make` draws new inputs each time."""

    kernel: str
    sizes: str
    make: Callable[[], Work]


class Kernel(NamedTuple):
    """A kernel at all its sizes."""

    name: str
    letters: str
    """of docs/shapes.md, one for each number of a size"""
    sizes: tuple[int | tuple[int, ...], ...]
    make: Callable[..., Work]


class Paged(NamedTuple):
    """Keys and values of some requests, in pages without order."""

    k_pages: torch.Tensor  # [P, page_size, Hk, D], like v_pages
    v_pages: torch.Tensor
    page_table: torch.Tensor  # [B, max_pages] int32
    rows: torch.Tensor  # [B] int32
    seq_lens: torch.Tensor  # [B] int32
    read_bytes: int
    """of the keys and values that are used"""


class Draw:
    """Random inputs for a model's kernels, in `dtype` on `device`."""

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        """Normal numbers, of the kernels' dtype."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0, deviation, generator=self._generator)

    def ids(self, count: int, below: int) -> torch.Tensor:
        """Integers `[count]` int64 below a number."""
        return torch.randint(below, (count,), generator=self._generator, device=self.device)

    def full(self, count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A value for each row."""
        return torch.full((count,), value, dtype=dtype, device=self.device)

    def int32(self, values: Sequence[Any]) -> torch.Tensor:
        """What a step's plan says."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def order(self, count: int) -> torch.Tensor:
        """The integers below `count`, in random order."""
        return torch.randperm(count, generator=self._generator, device=self.device)

    @functools.cached_property
    def embedding(self) -> torch.Tensor:
        """`[V, hidden]`, once: rows of it that are looked up are other ones each time."""
        return self.normal(self.model.vocab_size, self.model.hidden_size)

    def paged(self, lengths: list[int]) -> Paged:
        """Keys and values of requests of these lengths."""
        counts = [div_ceil(length, PAGE_SIZE) for length in lengths]
        heads, head_dim = self.model.num_kv_heads, self.model.head_dim
        k_pages, v_pages = self.normal(2, sum(counts), PAGE_SIZE, heads, head_dim)
        pieces = [piece.int() for piece in self.order(sum(counts)).split(counts)]
        table = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        token_bytes = 2 * heads * head_dim * k_pages.itemsize
        return Paged(
            k_pages,
            v_pages,
            table,
            self.int32(range(len(lengths))),
            self.int32(lengths),
            sum(lengths) * token_bytes,
        )


def kernel_cases(draw: Draw) -> list[Case]:
    """Every kernel at the sizes in which a model of `draw`'s shape calls it.

    Kernels are imported when their inputs are made: listing them needs no Triton.
    """
    cases = []
    for kernel, letters, sizes, make in sized_kernels(draw.model):
        for size in sizes:
            given = size if isinstance(size, tuple) else (size,)
            named = zip(letters.split(), given, strict=True)
            text = ", ".join(f"{letter} {value:,}" for letter, value in named)
            cases.append(Case(kernel, text, partial(make, draw, *given)))
    return cases


def sized_kernels(model: ModelConfig) -> list[Kernel]:
    """What a model of this shape runs."""
    return [*_KERNELS, *_linears(model)]


def _rmsnorm(draw: Draw, tokens: int) -> Work:
    from minisgl.kernel.triton.norm import rmsnorm

    hidden, eps = draw.model.hidden_size, draw.model.rms_norm_eps
    x, weight = draw.normal(tokens, hidden), draw.normal(hidden)
    return Work(lambda: rmsnorm(x, weight, eps), 2 * x.nbytes + weight.nbytes)


def _fused_add_rmsnorm(draw: Draw, tokens: int) -> Work:
    from minisgl.kernel.triton.norm import fused_add_rmsnorm

    hidden, eps = draw.model.hidden_size, draw.model.rms_norm_eps
    x, residual = draw.normal(2, tokens, hidden)
    weight = draw.normal(hidden)
    return Work(lambda: fused_add_rmsnorm(x, residual, weight, eps), 4 * x.nbytes + weight.nbytes)


def _qk_norm_rope_store(draw: Draw, tokens: int) -> Work:
    from minisgl.kernel.triton.rope import qk_norm_rope_store

    model = draw.model
    heads, kv_heads, head_dim = model.num_qo_heads, model.num_kv_heads, model.head_dim
    qkv = draw.normal(tokens, (heads + 2 * kv_heads) * head_dim)
    k_cache, v_cache = draw.normal(2, 2 * tokens, kv_heads, head_dim)
    slots = draw.order(2 * tokens)[:tokens]
    table = draw.normal(MAX_POSITION, head_dim).float()
    positions = draw.ids(tokens, MAX_POSITION)
    normed = "qwen3" in model.model_type
    q_weight, k_weight = draw.normal(2, head_dim) if normed else (None, None)
    return Work(
        lambda: qk_norm_rope_store(
            qkv,
            positions,
            slots,
            k_cache,
            v_cache,
            table,
            heads,
            kv_heads,
            head_dim,
            q_weight,
            k_weight,
            model.rms_norm_eps,
        ),
        2 * qkv.nbytes + tokens * table[0].nbytes + slots.nbytes + positions.nbytes,
    )


def _silu_and_mul(draw: Draw, tokens: int) -> Work:
    from minisgl.kernel.triton.activation import silu_and_mul

    model = draw.model
    inner = model.moe_intermediate_size if model.is_moe else model.intermediate_size
    x = draw.normal(tokens, 2 * inner)
    return Work(lambda: silu_and_mul(x), x.nbytes * 3 // 2)


def _indexing(draw: Draw, tokens: int) -> Work:
    from minisgl.kernel.triton.embedding import indexing

    weight, ids = draw.embedding, draw.ids(tokens, draw.model.vocab_size)
    return Work(lambda: indexing(weight, ids), 2 * tokens * weight[0].nbytes + ids.nbytes)


def _linear(out: int, size: int, draw: Draw, rows: int) -> Work:
    x, weight = draw.normal(rows, size), draw.normal(out, size, deviation=0.02)
    moved = x.nbytes + weight.nbytes + rows * out * x.itemsize
    return Work(lambda: F.linear(x, weight), moved, 2 * rows * out * size)


def _invariant_linear(out: int, size: int, draw: Draw, rows: int) -> Work:
    from minisgl.kernel.triton.gemm import invariant_linear

    x, weight = draw.normal(rows, size), draw.normal(out, size, deviation=0.02)
    moved = x.nbytes + weight.nbytes + rows * out * x.itemsize
    return Work(lambda: invariant_linear(x, weight), moved, 2 * rows * out * size)


def _prefill_attention(draw: Draw, count: int, length: int) -> Work:
    from minisgl.kernel.triton.prefill import PrefillPlan, block_tokens, prefill_attention

    model = draw.model
    heads, head_dim = model.num_qo_heads, model.head_dim
    keys = draw.paged([length] * count)
    q = draw.normal(count * length, heads, head_dim)
    out = torch.empty_like(q)
    step = block_tokens(heads, model.num_kv_heads, head_dim, draw.dtype)
    items = [(b, start) for b in range(count) for start in range(0, length, step)]
    starts = draw.int32(range(0, count * length + 1, length))
    plan = PrefillPlan(
        draw.int32(items), draw.int32([len(items)]), keys.rows, starts, keys.seq_lens
    )
    return Work(
        lambda: prefill_attention(
            q,
            keys.k_pages,
            keys.v_pages,
            keys.page_table,
            plan,
            out,
            scale=head_dim**-0.5,
            window=None,
        ),
        2 * q.nbytes + keys.read_bytes,
        2 * heads * head_dim * count * length * (length + 1),  # half of the scores are masked
    )


def _decode_attention(draw: Draw, count: int) -> Work:
    from minisgl.kernel.triton.decode import DecodePlan, decode_attention, plan_decode

    keys = draw.paged(decode_lengths(count))
    q = draw.normal(count, draw.model.num_qo_heads, draw.model.head_dim)
    out = torch.empty_like(q)
    # The plan is made once a step, for all layers: it takes no part in the time.
    plan = DecodePlan.empty(count, draw.model.num_kv_heads, None, draw.device)
    plan_decode(keys.rows, keys.seq_lens, draw.int32([count]), plan)
    return Work(
        lambda: decode_attention(
            q,
            keys.k_pages,
            keys.v_pages,
            keys.page_table,
            plan,
            out,
            scale=draw.model.head_dim**-0.5,
        ),
        2 * q.nbytes + keys.read_bytes,
        2 * draw.model.num_qo_heads * keys.read_bytes // draw.model.num_kv_heads // q.itemsize,
    )


def decode_lengths(count: int) -> list[int]:
    """Keys of the reference workload's first requests, each half way through its output."""
    return [len(job.prompt) + job.output_len // 2 for job in reference_workload(count)]


def _choose_tokens(draw: Draw, rows: int) -> Work:
    from minisgl.kernel.triton.sample import choose_tokens

    logits, temperature = draw.normal(rows, draw.model.vocab_size), draw.full(rows, 0.6)
    seeds, positions = draw.ids(rows, 1 << 62), draw.ids(rows, MAX_POSITION)
    choices = draw.full(rows, 0, torch.int64)
    return Work(
        lambda: choose_tokens(logits, temperature, seeds, positions, choices, None, None),
        logits.nbytes,
    )


def _find_thresholds(draw: Draw, rows: int) -> Work:
    from minisgl.kernel.triton.threshold import find_thresholds

    logits, temperature = draw.normal(rows, draw.model.vocab_size), draw.full(rows, 0.6)
    top_k, top_p = draw.full(rows, 20, torch.int64), draw.full(rows, 0.95)
    min_p = draw.full(rows, 0.05)
    return Work(lambda: find_thresholds(logits, temperature, top_k, top_p, min_p), logits.nbytes)


def _linears(model: ModelConfig) -> list[Kernel]:
    """The projections and the head, by torch and by the kernel that no batch size changes."""
    hidden, q = model.hidden_size, model.num_qo_heads * model.head_dim
    shapes = {
        "qkv": (q + 2 * model.num_kv_heads * model.head_dim, hidden),
        "o": (hidden, q),
    }
    if not model.is_moe:
        inner = model.intermediate_size
        shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    shapes["head"] = (model.vocab_size, hidden)
    kernels = []
    for name, shape in shapes.items():
        invariant_rows = (64,) if name == "head" else (64, 8192)  # a head has a row a request
        kernels += [
            Kernel(f"linear {name}", "M", (1, 16, 64, 256), partial(_linear, *shape)),
            Kernel(f"invariant {name}", "M", invariant_rows, partial(_invariant_linear, *shape)),
        ]
    return kernels


_KERNELS = (
    Kernel("rmsnorm", "T", (1, 256, 8192), _rmsnorm),
    Kernel("fused_add_rmsnorm", "T", (1, 256, 8192), _fused_add_rmsnorm),
    Kernel("qk_norm_rope_store", "T", (1, 256, 8192), _qk_norm_rope_store),
    Kernel("silu_and_mul", "T", (1, 256, 8192), _silu_and_mul),
    Kernel("indexing", "T", (1, 256, 8192), _indexing),
    Kernel("decode_attention", "B", (1, 16, 64, 256), _decode_attention),
    Kernel("prefill_attention", "B n", ((1, 8192), (16, 1024)), _prefill_attention),
    Kernel("choose_tokens", "B", (1, 256), _choose_tokens),
    Kernel("find_thresholds", "B", (1, 256), _find_thresholds),
)
