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
from minisgl.kernel.triton.inputs import fill_inputs, scatter
from minisgl.kvcache import KVPool
from minisgl.layers import local_heads
from minisgl.models import ModelConfig
from minisgl.models.base import BaseLLMModel
from minisgl.utils.logger import get_logger
from minisgl.utils.transfer import to_device

from .cuda_graphs import CudaGraphs, Shape, graph_shapes
from .drawer import Drawer
from .triton_drawer import TritonDrawer

__all__ = ["CudaForward"]

logger = get_logger(__name__)


@dataclass(eq=False)
class _Inputs:
    """`ModelInputs` of a shape: views of the buffers."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    attn_metadata: TritonMetadata
    size: int
    is_prefill: bool
    prompt_logits: PromptLogitsSink | None = None


class _Buffers:
    """A step's numbers on the host and on the device, and its inputs with one entry a token."""

    def __init__(self, max_tokens: int, max_reqs: int, device: torch.device) -> None:
        # Parts of the one array that is sent, each at a multiple of 16 bytes.
        width = (max_reqs + 4) // 4 * 4
        self._host = np.zeros((5, width), dtype=np.int32)
        self._sent = torch.zeros((5, width), dtype=torch.int32, device=device)
        self.tokens = torch.zeros((3, max_tokens), dtype=torch.int64, device=device)
        self.last = torch.zeros(max_reqs, dtype=torch.int64, device=device)

    def send(self, batch: Batch, num_decodes: int) -> None:
        """Queue the copy of the batch's numbers; their memory may change at once afterwards."""
        host, size = self._host, batch.size
        host[0, :3] = num_decodes, size, batch.num_tokens
        host[1, :size] = batch.rows
        host[2, :size] = batch.cached_lens
        host[3, :size] = batch.device_lens
        host[4, 0] = 0
        np.cumsum(batch.extend_lens, out=host[4, 1 : size + 1])
        self._sent.copy_(torch.from_numpy(host), non_blocking=True)

    def tables(self, num_reqs: int) -> StepTables:
        """What kernels read of a step with room for so many requests."""
        counts, rows, cached, lens, starts = self._sent
        return StepTables(
            counts, rows[:num_reqs], cached[:num_reqs], lens[:num_reqs], starts[: num_reqs + 1]
        )


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
        self.num_replayed = self.num_launched = 0

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on; capture the graphs over it."""
        config = self._config
        heads, _ = local_heads(self._model_config.num_qo_heads, self._model_config.num_kv_heads)
        self._tables = token_pool, page_table
        self._dummy_page = pool.dummy_page
        self._buffers = _Buffers(
            config.max_prefill_length, config.max_running_requests, config.device
        )
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

    def run(self, batch: Batch) -> None:
        """Launch the batch; a prompt's logits go to its sink on the way."""
        num_tokens, size = batch.num_tokens, batch.size
        decodes = batch.extend_lens == 1
        # The first requests of a batch decode; another of one token is a chunk among the prefills.
        num_decodes = size if decodes.all() else int(decodes.argmin())
        if self._config.deterministic:
            num_decodes = 0
        self._buffers.send(batch, num_decodes)
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
        tables = buffers.tables(shape.num_reqs)
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
            metadata = self._backend.plan(tables, last, shape.num_tokens, shape.num_decodes)
            inputs = _Inputs(
                ids, positions, out_loc, metadata, shape.num_reqs, shape.is_prefill, sink
            )
            with using(self._ops), self._ctx.forward_batch(inputs):
                return self._model.forward()
