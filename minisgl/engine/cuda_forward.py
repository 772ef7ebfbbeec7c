"""A batch through the model on a CUDA device by the Triton kernels, captured or launched.

    host     numbers of the step: one small copy          tokens: read a step later
    device   inputs, plan, layers, logits (one graph) | sampling | tokens into the pool

Everything that changes from step to step lies in `_Buffers`, so that a graph reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl.attention.triton_backend import StepTables, TritonBackend, TritonMetadata
from minisgl.config import ResolvedConfig
from minisgl.core import Batch, Context, PromptLogitsSink
from minisgl.kernel.dispatch import triton_ops, using
from minisgl.kernel.triton.inputs import fill_inputs, receive, scatter
from minisgl.kvcache import KVPool
from minisgl.layers import local_heads
from minisgl.models import ModelConfig
from minisgl.models.base import BaseLLMModel
from minisgl.utils.transfer import to_device

from .cuda_graphs import CudaGraphs, Shape, graph_shapes
from .drawer import Drawer
from .triton_drawer import TritonDrawer

__all__ = ["CudaForward"]

_STAGES = 4
"""Steps whose numbers may be on their way; the scheduler launches two before it reads one."""
_MAX_WRITES = 16_384
"""Changes of the page table that fit a transfer; more go by a copy of their own."""
_NO_WRITES = np.zeros((3, 0), dtype=np.int32)


@dataclass(eq=False)
class _Inputs:
    """`ModelInputs` of a shape: views of the buffers."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    attn_metadata: TritonMetadata
    size: int
    is_prefill: bool
    logits_out: torch.Tensor
    prompt_logits: PromptLogitsSink | None = None


class _Buffers:
    """What a step is told, on its way to the device, and its inputs with one entry a token.

    A step's numbers and changes of the page table are written into pinned memory, from where a
    kernel fetches them. The memory is written again some steps later, when that kernel is done.
    All steps leave their logits in one place: a graph would hold memory of its own for them.
    """

    def __init__(self, config: ResolvedConfig, vocab_size: int) -> None:
        max_tokens, max_reqs = config.max_prefill_length, config.max_running_requests
        device, dtype = config.device, config.dtype
        # Each row at a multiple of 16 bytes: counts, five of requests, and those that sample.
        width = (max_reqs + 4) // 4 * 4
        self._numbers = numbers = torch.zeros((7, width), dtype=torch.int32, device=device)
        size = self._numbers.numel() + 3 * _MAX_WRITES
        self._is_pinned = pinned = device.type == "cuda"
        self._staged = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_STAGES)
        ]
        self._fetched: list[torch.cuda.Event | None] = [None] * _STAGES
        self._turn = 0
        self.tables = StepTables(
            numbers[0],
            numbers[1, :max_reqs],
            numbers[2, :max_reqs],
            numbers[3, :max_reqs],
            numbers[4, : max_reqs + 1],
        )
        self.tokens = torch.zeros((3, max_tokens), dtype=torch.int64, device=device)
        self.last = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self.logits = torch.zeros((max_reqs, vocab_size), dtype=dtype, device=device)

    def send(
        self,
        batch: Batch,
        num_decodes: int,
        sampling: np.ndarray,
        writes: np.ndarray,
        page_table: torch.Tensor,
    ) -> None:
        """Queue the transfer of the batch's numbers, of the places that sample, and of `writes
        [3, n]` to the page table."""
        turn = self._turn
        self._turn = (turn + 1) % _STAGES
        event = self._fetched[turn]
        if event is not None:
            event.synchronize()
        staged, size = self._staged[turn], batch.size
        host = staged.numpy()
        end = self._numbers.numel()
        numbers = host[:end].reshape(7, -1)
        numbers[0, :3] = num_decodes, size, batch.num_tokens
        numbers[1, :size] = batch.rows
        numbers[2, :size] = batch.cached_lens
        numbers[3, :size] = batch.device_lens
        numbers[4, 0] = 0
        np.cumsum(batch.extend_lens, out=numbers[4, 1 : size + 1])
        numbers[5, : len(sampling)] = batch.rows[sampling]
        numbers[6, : len(sampling)] = batch.total_lens[sampling]
        host[end : end + writes.size] = writes.reshape(-1)
        receive(staged, self._numbers.view(-1), page_table, writes.shape[1])
        if self._is_pinned:
            self._fetched[turn] = event = event or torch.cuda.Event()
            event.record()

    def sampled(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of the tokens that the step samples: `[count]` int32 each."""
        return self._numbers[5, :count], self._numbers[6, :count]


class CudaForward:
    """`model.forward()` by the Triton kernels; see the module's docstring."""

    reads_unused_slots = False

    def __init__(
        self, model: BaseLLMModel, model_config: ModelConfig, config: ResolvedConfig
    ) -> None:
        self._model = model
        self._config = config
        self._model_config = model_config
        self._ops = triton_ops(config.deterministic)
        self._windows = [model_config.layer_window(i) for i in range(model_config.num_layers)]
        self._writes = _NO_WRITES
        self.num_replayed = self.num_launched = 0

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on; capture the graphs over it."""
        config = self._config
        heads, _ = local_heads(self._model_config.num_qo_heads, self._model_config.num_kv_heads)
        self._tables = token_pool, page_table
        self._dummy_page = pool.dummy_page
        self._buffers = _Buffers(config, self._model_config.vocab_size)
        self._backend = TritonBackend(
            pool,
            page_table,
            self._windows,
            heads,
            config.max_running_requests,
        )
        self._ctx = Context(config.page_size, self._backend)
        shapes = graph_shapes(
            config.cuda_graph_max_bs,
            config.max_running_requests,
            config.max_prefill_length,
            config.deterministic,
        )
        self._graphs = CudaGraphs(self._compute, shapes, config.device)

    def unbind(self) -> None:
        """Let the memory go."""
        del self._tables, self._buffers, self._backend, self._ctx, self._graphs, self._logits

    def describe(self) -> str:
        """Which op is computed by what, for the log."""
        attention = "prefill" if self._config.deterministic else "prefill, decode"
        return (
            f"{self._ops.describe()}; QK-norm + RoPE + KV store: kernel.triton.rope; attention: "
            f"kernel.triton ({attention}); {len(self._graphs)} CUDA graphs"
        )

    def set_pages(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """Change the page table with the next step's transfer."""
        # Not added to what is there: that is of a launch that failed, and told again.
        self._writes = np.array((rows, columns, pages), dtype=np.int32)

    def run(self, batch: Batch, sampling: np.ndarray) -> None:
        """Launch the batch; a prompt's logits go to its sink on the way."""
        num_tokens, size = batch.num_tokens, batch.size
        decodes = batch.extend_lens == 1
        # The first requests of a batch decode; another of one token is a chunk among the prefills.
        num_decodes = size if decodes.all() else int(decodes.argmin())
        if self._config.deterministic:
            num_decodes = 0
        writes, self._writes = self._writes, _NO_WRITES
        if writes.shape[1] > _MAX_WRITES:
            scatter(self._tables[1], *to_device(writes, self._config.device).unbind())
            writes = _NO_WRITES
        self._buffers.send(batch, num_decodes, sampling, writes, self._tables[1])
        shape = None
        if batch.prompt_logits is None:
            shape = self._graphs.find(num_tokens, size, num_tokens > size)
        if shape is not None:
            self._logits = self._graphs.replay(shape)
            self.num_replayed += 1
        else:
            exact = Shape(num_tokens, size, num_decodes, num_tokens > size)
            self._logits = self._compute(exact, batch.prompt_logits)
            self.num_launched += 1

    def sampled_places(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and positions of the tokens to sample, on the device."""
        return self._buffers.sampled(len(rows))

    def logits(self, places: np.ndarray) -> torch.Tensor:
        """Of the last token of the batch's requests at `places [n]`: `[n, vocab]`."""
        count = len(places)
        if places[-1] == count - 1:  # the first ones, in order
            return self._logits[:count]
        return self._logits[to_device(places, self._logits.device)]

    def drawer(self) -> Drawer:
        """Draws tokens on the device."""
        return TritonDrawer(self._config.device, self._model_config.vocab_size)

    def write(
        self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
    ) -> None:
        """`table[rows, columns] = values`, in one launch."""
        scatter(table, rows, columns, values)

    def _compute(self, shape: Shape, sink: PromptLogitsSink | None = None) -> torch.Tensor:
        """Launch a step with room for `shape`: logits `[num_reqs, vocab]`."""
        buffers, (token_pool, page_table) = self._buffers, self._tables
        tables = buffers.tables
        ids, positions, out_loc = buffers.tokens[:, : shape.num_tokens]
        last = buffers.last[: shape.num_reqs]
        with torch.inference_mode():
            fill_inputs(
                tables.counts,
                tables.rows,
                tables.starts,
                tables.cached_lens,
                token_pool,
                page_table,
                self._config.page_size,
                self._dummy_page,
                (ids, positions, out_loc, last),
            )
            metadata = self._backend.plan(
                tables, last, shape.num_tokens, shape.num_decodes, is_prefill=shape.is_prefill
            )
            inputs = _Inputs(
                ids,
                positions,
                out_loc,
                metadata,
                shape.num_reqs,
                shape.is_prefill,
                buffers.logits,
                sink,
            )
            with using(self._ops), self._ctx.forward_batch(inputs):
                return self._model.forward()
