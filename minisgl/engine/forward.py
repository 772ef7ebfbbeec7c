"""A batch through the model: by the op layer in PyTorch, by Triton kernels (`cuda_forward.py`), or
in one call of the native kernels.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minisgl.attention import TorchBackend
from minisgl.config import ResolvedConfig
from minisgl.core import Batch, Context, PromptLogitsSink
from minisgl.kernel.dispatch import reference_ops, triton_ops, using
from minisgl.kvcache import KVPool
from minisgl.models import ModelConfig
from minisgl.models.base import BaseLLMModel
from minisgl.models.decoder import CausalLM
from minisgl.utils.transfer import to_device

from .drawer import BatchDrawer, Drawer
from .inputs import fill_batch

__all__ = ["Forward", "NativeForward", "TorchForward", "make_forward"]

_PIECE_ROWS = 256
"""Rows of prompt logits computed at once: 256 x 151,936 float32 are 156 MB."""


class Forward(Protocol):
    """What the engine needs of the model: `bind` to memory, `run` a batch, then `logits`."""

    reads_unused_slots: bool
    """Whether a page must be cleared before a new owner gets it: masks multiply what lies there by
    0, and 0 * NaN is NaN."""

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on."""
        ...

    def unbind(self) -> None:
        """Let the memory go."""
        ...

    def describe(self) -> str:
        """Which op is computed by what, for the log."""
        ...

    def run(self, batch: Batch) -> None:
        """Compute the batch; a prompt's logits go to its sink on the way."""
        ...

    def logits(self, places: np.ndarray) -> torch.Tensor:
        """Of the last token of the batch's requests at `places [n]`: `[n, vocab]`."""
        ...

    def drawer(self) -> Drawer | None:
        """What draws tokens; None for the reference."""
        ...

    def write(
        self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
    ) -> None:
        """`table[rows, columns] = values` for int64 tensors `[n]` on the device."""
        ...


def make_forward(
    model: BaseLLMModel, model_config: ModelConfig, config: ResolvedConfig
) -> Forward:
    """The forward that the configuration asks for."""
    if config.native:
        return NativeForward(model, model_config, config)
    if config.attn == "triton":
        from .cuda_forward import CudaForward

        return CudaForward(model, model_config, config)
    return TorchForward(model, model_config, config)


class TorchForward:
    """`model.forward()` under the batch's context, on any device."""

    reads_unused_slots = True

    def __init__(
        self, model: BaseLLMModel, model_config: ModelConfig, config: ResolvedConfig
    ) -> None:
        self._model = model
        self._config = config
        self._vocab_size = model_config.vocab_size
        self._ops = triton_ops() if config.triton else reference_ops()
        self._windows = [model_config.layer_window(i) for i in range(model_config.num_layers)]

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on."""
        self._tables = token_pool, page_table
        self._backend = TorchBackend(pool, page_table, self._windows)
        self._ctx = Context(self._config.page_size, self._backend)

    def unbind(self) -> None:
        """Let the memory go."""
        del self._tables, self._backend, self._ctx, self._logits

    def describe(self) -> str:
        """Which op is computed by what, for the log."""
        return f"{self._ops.describe()}; attention: {self._config.attn}"

    def run(self, batch: Batch) -> None:
        """Compute the batch; a prompt's logits go to its sink on the way."""
        fill_batch(batch, *self._tables, self._config.page_size)
        batch.attn_metadata = self._backend.prepare_metadata(batch)
        with using(self._ops), self._ctx.forward_batch(batch):
            self._logits = self._model.forward()

    def logits(self, places: np.ndarray) -> torch.Tensor:
        """Of the last token of the batch's requests at `places [n]`: `[n, vocab]`."""
        if len(places) == self._logits.shape[0]:
            return self._logits
        return self._logits[to_device(places, self._logits.device)]

    def drawer(self) -> Drawer | None:
        """On CUDA with Triton, its kernels; else the reference."""
        if not self._config.triton:
            return None
        from .triton_drawer import TritonDrawer

        return TritonDrawer(self._config.device, self._vocab_size)

    def write(
        self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
    ) -> None:
        """`table[rows, columns] = values`."""
        table[rows, columns] = values.to(table.dtype)


class NativeForward:
    """The same by `models.native`, on a CPU; the model's weights move into its layout."""

    reads_unused_slots = False

    def __init__(
        self, model: BaseLLMModel, model_config: ModelConfig, config: ResolvedConfig
    ) -> None:
        from minisgl.models.native import NativeModel

        assert isinstance(model, CausalLM), "resolve() allows native kernels for these only"
        self._native = NativeModel(model, model_config, config.dtype, config.threads)
        self._vocab_size = model_config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads."""
        return self._native.weight_bytes

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on."""
        self._native.bind(pool, page_table, token_pool)

    def unbind(self) -> None:
        """Nothing is measured on a CPU, so nobody asks."""
        raise NotImplementedError("native kernels keep the memory that they are bound to")

    def describe(self) -> str:
        """For the log."""
        return "every op: kernel.cpu, one call a step"

    def run(self, batch: Batch) -> None:
        """Compute the batch; a prompt's logits go to its sink."""
        self._native.forward(batch)
        self._last_rows = batch.extend_lens.cumsum() - 1
        if batch.prompt_logits is not None:
            self._score(batch.prompt_logits)

    def logits(self, places: np.ndarray) -> torch.Tensor:
        """Of the last token of the batch's requests at `places [n]`: `[n, vocab]` float32."""
        return self._native.logits(self._last_rows[places])

    def greedy(self, places: np.ndarray) -> torch.Tensor:
        """The most likely token after each of the requests at `places [n]`: `[n]` int64."""
        return self._native.greedy(self._last_rows[places])

    def drawer(self) -> Drawer:
        """Draws tokens by the same threads."""
        from minisgl.kernel.cpu.sample import NativeDrawer

        row_drawer = NativeDrawer(self._native._pool, self._vocab_size)
        return BatchDrawer(row_drawer, torch.device("cpu"))

    def write(
        self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
    ) -> None:
        """`table[rows, columns] = values`."""
        table[rows, columns] = values.to(table.dtype)

    def _score(self, sink: PromptLogitsSink) -> None:
        rows = sink.rows.numpy()
        for offset in range(0, len(rows), _PIECE_ROWS):
            sink.collect(offset, self._native.logits(rows[offset : offset + _PIECE_ROWS]))
