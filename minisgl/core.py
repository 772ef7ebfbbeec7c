"""What every layer of the engine speaks of: sampling parameters, requests, batches, the context.

    SamplingParams ──> Req ──> Batch ──> Context (one per engine; the ops read it globally)

A request owns a growing list of token ids and a row of the page table. Its lengths obey

    0 <= cached_len <= device_len <= num_tokens <= max_len

    tokens      | prompt ............... | output ........... | pending |
                0           cached_len   device_len           |         num_tokens
                | KV written | next step | not yet computed   len(token_ids)

`cached_len` tokens have their keys and values in the pool, or will have when the steps launched
so far are done; the step being prepared computes the tokens `[cached_len, device_len)`, and when
it is launched `cached_len` becomes `device_len`. `num_pending` tokens were sampled by launched
steps whose result the host has not read: their place is known, their ids only to the device.

The protocols at the end are what upper rows implement and lower rows call, so that no lower
row imports an upper one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .params import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "Batch",
    "Context",
    "Executor",
    "FinishedStep",
    "ModelInputs",
    "PageWrites",
    "PendingStep",
    "QKV",
    "Req",
    "SamplingParams",
    "StepOutput",
    "TokenLogprobs",
    "get_global_ctx",
    "set_global_ctx",
]


@dataclass(eq=False)
class Req:
    """One sequence being generated (a request with n > 1 is n of these)."""

    uid: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    max_len: int
    """No token is generated once `len(token_ids)` reaches this."""
    seed: int = 0
    """64-bit seed of this request's random numbers, drawn by the front when the user gave none."""
    choice: int = 0
    """Index among the n sequences of one request; part of the random key."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence (EOS and the user's); empty with `ignore_eos`."""
    eos_ids: frozenset[int] = frozenset()
    """All the model's EOS ids, which `min_tokens` bans whether or not they stop."""
    priority: int = 0
    """Smaller runs earlier and is retracted later; equal ones by arrival."""
    arrival: int = -1
    """Place among all requests by the time they were queued; given by the scheduler."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    row: int = -1
    """Row in the page table while running, else -1."""
    pages: list[int] = field(default_factory=list)
    """Pages of the KV pool that hold `[0, device_len)`, in order."""
    num_shared: int = 0
    """How many of `pages`, from the first, belong to the prefix cache; the rest to the request."""
    cached_len: int = 0
    device_len: int = 0
    num_pending: int = 0
    """Tokens that launched steps sample and the host has not read."""
    num_in_flight: int = 0
    """Launched steps with this request whose result the host has not read."""
    num_cached_tokens: int = 0
    """Prompt tokens read from the prefix cache instead of computed, before the first output."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities were delivered; a resumed request skips them."""
    started_s: float = 0.0
    """When it got a row for the first time (monotonic clock): told, never decided by."""
    retracted: bool = False
    """It lost its pages at least once, and what it reads from the prefix cache may be its own."""
    finished: bool = False
    """Its end was told; a step in flight may still compute a token, to be thrown away."""
    cache_handle: object = None
    """What the prefix cache keeps about this request; opaque to everyone else."""

    @property
    def is_running(self) -> bool:
        """Whether it has a row, and may have pages."""
        return self.row >= 0

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight: the length after all launched steps."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Tokens generated so far that the host has read."""
        return len(self.token_ids) - self.prompt_len

    @property
    def extend_len(self) -> int:
        """Tokens that the step being prepared computes."""
        return self.device_len - self.cached_len

    @property
    def samples(self) -> bool:
        """Whether the step being prepared reaches the last token, so that one is sampled."""
        return self.device_len == self.num_tokens

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, prompt={self.prompt_len}, output={self.num_output}, "
            f"cached={self.cached_len}, device={self.device_len}, row={self.row})"
        )


class AttentionMetadata(Protocol):
    """What an attention backend prepared for one batch."""

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of each request's last token in the batch: `[bs]`, int64."""
        ...


class ModelInputs(Protocol):
    """What a model's ops read of the batch being computed, T tokens of B requests."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    out_loc: torch.Tensor  # [T] int64, slot in the KV pool of each token
    prompt_logits: PromptLogitsSink | None
    """Receives the logits of further rows when a request wants its prompt's logprobs."""

    @property
    def logits_out(self) -> torch.Tensor | None:
        """`[>= B, V]`: where the logits go, None for memory of their own."""
        ...

    @property
    def attn_metadata(self) -> AttentionMetadata:
        """What the attention backend prepared."""
        ...

    @property
    def size(self) -> int:
        """Number of requests (B)."""
        ...

    @property
    def is_prefill(self) -> bool:
        """Whether any request computes more than one token."""
        ...


@dataclass(eq=False)
class Batch:
    """The requests that one forward computes, decoding ones and prefill chunks mixed.

    The arrays `[B]` int64 are a snapshot taken here: the executor reads lengths from them and
    not from the requests, which move on while an asynchronous device still computes the step.
    The tensors are filled by the engine: T tokens, one after another by request.
    """

    reqs: list[Req]
    rows: np.ndarray = field(init=False)
    """Each request's row in the page table and the token pool."""
    cached_lens: np.ndarray = field(init=False)
    """Tokens that have keys and values before this step."""
    device_lens: np.ndarray = field(init=False)
    """Tokens that have them after it."""
    total_lens: np.ndarray = field(init=False)
    """Tokens known or in flight, that is the position of a token sampled in this step."""
    input_ids: torch.Tensor = field(init=False)  # [T] int64
    positions: torch.Tensor = field(init=False)  # [T] int64
    out_loc: torch.Tensor = field(init=False)  # [T] int64, slot in the KV pool of each token
    attn_metadata: AttentionMetadata = field(init=False)
    prompt_logits: PromptLogitsSink | None = None
    """Receives the logits of further rows when a request wants its prompt's logprobs."""
    logits_out: torch.Tensor | None = None
    """`[>= B, V]`: where the logits go, None for memory of their own."""

    def __post_init__(self) -> None:
        reqs, count = self.reqs, len(self.reqs)
        self.rows = np.fromiter([r.row for r in reqs], np.int64, count)
        self.cached_lens = np.fromiter([r.cached_len for r in reqs], np.int64, count)
        self.device_lens = np.fromiter([r.device_len for r in reqs], np.int64, count)
        totals = [len(r.token_ids) + r.num_pending for r in reqs]
        self.total_lens = np.fromiter(totals, np.int64, count)

    @property
    def size(self) -> int:
        """Number of requests (B)."""
        return len(self.reqs)

    @property
    def extend_lens(self) -> np.ndarray:
        """Tokens that the step computes of each request."""
        lengths: np.ndarray = self.device_lens - self.cached_lens
        return lengths

    @property
    def samples(self) -> np.ndarray:
        """Whether each request reaches its last token, so that one is sampled: `[B]` bool."""
        samples: np.ndarray = self.device_lens == self.total_lens
        return samples

    @property
    def num_tokens(self) -> int:
        """Number of tokens (T)."""
        return int(self.extend_lens.sum())

    @property
    def is_prefill(self) -> bool:
        """True when any request computes more than one token."""
        return bool((self.extend_lens > 1).any())


class PromptLogitsSink(Protocol):
    """Takes the prompt's logits piece by piece, so that they never exist all at once."""

    rows: torch.Tensor  # [N] int64, rows of the batch whose logits are wanted

    def collect(self, offset: int, logits: torch.Tensor) -> None:
        """Logits `[n, V]` of `rows[offset : offset + n]`."""
        ...


class QKV(NamedTuple):
    """A layer's projections before QK-norm and RoPE, and what these need."""

    projected: torch.Tensor  # [T, (Hq + 2 Hk) D], may be overwritten
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin_cache: torch.Tensor  # [max_pos, rotary_dim] float32
    q_weight: torch.Tensor | None  # [D], None without QK-norm
    k_weight: torch.Tensor | None
    eps: float


class AttentionBackend(Protocol):
    """Writes keys and values into the pool and computes attention over the pages."""

    fuses_qkv: bool
    """Whether `forward_qkv` is there, which does QK-norm, RoPE and the KV store in one kernel."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ModelInputs
    ) -> torch.Tensor:
        """`q [T, Hq, D]`, `k, v [T, Hk, D]` to `[T, Hq, D]`; stores k and v on the way."""
        ...

    def forward_qkv(self, qkv: QKV, layer_id: int, batch: ModelInputs) -> torch.Tensor:
        """The same from the projections: `[T, Hq, D]`."""
        ...


class Context:
    """What the ops of one engine share while a forward runs."""

    def __init__(self, page_size: int, attn_backend: AttentionBackend) -> None:
        self.page_size = page_size
        self.attn_backend = attn_backend
        self._batch: ModelInputs | None = None

    @property
    def batch(self) -> ModelInputs:
        """The batch being computed."""
        if self._batch is None:
            raise RuntimeError("No batch is being computed: use `with ctx.forward_batch(batch)`")
        return self._batch

    @contextmanager
    def forward_batch(self, batch: ModelInputs) -> Iterator[None]:
        """Make `batch` current and this the global context, inside the block."""
        global _ctx
        if self._batch is not None:
            raise RuntimeError("Forward passes of one context can't be nested")
        outer, _ctx = _ctx, self
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None
            _ctx = outer


_ctx: Context | None = None


def set_global_ctx(ctx: Context | None) -> None:
    """Set the context that `get_global_ctx` returns outside of `forward_batch`."""
    global _ctx
    _ctx = ctx


def get_global_ctx() -> Context:
    """The context of the forward that runs now, or the one set by `set_global_ctx`."""
    if _ctx is None:
        raise RuntimeError("No global context is set")
    return _ctx


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    """Place of the token among all, 1 for the most likely."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


@dataclass(frozen=True)
class StepOutput:
    """What one forward gave, by the batch's requests in order."""

    token_ids: list[int | None]
    """The sampled token; None where a prompt chunk did not reach its end."""
    logprobs: list[TokenLogprobs | None] | None = None
    """None when no request asked for any."""
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    """For the prompt tokens after the ones this step computed; empty where not asked for."""


class PendingStep(Protocol):
    """A launched forward; an asynchronous device may still be computing it."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output."""
        ...


class PageWrites(NamedTuple):
    """Entries `(rows[i], columns[i])` of the page table that become `pages[i]`.

    `fresh` are the pages among them that no one has written for this owner: what an earlier
    owner left there is to be cleared.
    """

    rows: list[int]
    columns: list[int]
    pages: list[int]
    fresh: list[int]


@dataclass(frozen=True)
class FinishedStep:
    """A step that was over when its launch returned."""

    output: StepOutput

    def result(self) -> StepOutput:
        """The output, at once."""
        return self.output


class Executor(Protocol):
    """Runs batches; the scheduler needs nothing else of an engine.

    The calls take effect on the device in the order in which they are made.
    """

    def attach(self, req: Req) -> None:
        """The request got row `req.row`: take over its tokens and sampling state."""
        ...

    def set_pages(self, writes: PageWrites) -> None:
        """Change the page table; called at most once before each `launch`."""
        ...

    def launch(self, batch: Batch) -> PendingStep:
        """Start the forward of `batch` and return at once where the device allows it."""
        ...
