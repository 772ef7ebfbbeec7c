"""A batch through the model: by the op layer in PyTorch, by Triton kernels (`cuda_forward.py`), or
in one call of the native kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from minisgl.attention import TorchBackend
from minisgl.config import ResolvedConfig
from minisgl.core import Batch, Context, PromptLogitsSink
from minisgl.kernel.dispatch import reference_ops, triton_ops, using
from minisgl.kvcache import KVPool
from minisgl.layers import local_heads
from minisgl.layers.embedding import PIECE_ROWS
from minisgl.models import ModelConfig
from minisgl.models.base import BaseLLMModel
from minisgl.models.decoder import CausalLM
from minisgl.utils.transfer import to_device

from .drawer import BatchDrawer, Drawer
from .inputs import fill_batch

if TYPE_CHECKING:
    from minisgl.attention.flashinfer_backend import FlashInferBackend

__all__ = ["Forward", "NativeForward", "TorchForward", "make_forward"]


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

    def set_pages(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """`page_table[rows[i], columns[i]] = pages[i]`, before the next step is computed."""
        ...

    def run(self, batch: Batch, sampling: np.ndarray) -> None:
        """Compute the batch; a prompt's logits go to its sink on the way. `sampling [n]` are the
        places of the requests that sample."""
        ...

    def sampled_places(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows and positions `[n]` of the tokens to sample, as integers on the device."""
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
        """`table[rows, columns] = values` for integer tensors `[n]` on the device."""
        ...


def make_forward(model: BaseLLMModel, model_config: ModelConfig, config: ResolvedConfig) -> Forward:
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
        self._heads, _ = local_heads(model_config.num_qo_heads, model_config.num_kv_heads)
        self._ops = triton_ops() if config.triton else reference_ops()
        self._windows = [model_config.layer_window(i) for i in range(model_config.num_layers)]

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on."""
        self._tables = token_pool, page_table
        self._backend = self._make_backend(pool, page_table)
        self._ctx = Context(self._config.page_size, self._backend)

    def unbind(self) -> None:
        """Let the memory go."""
        del self._tables, self._backend, self._ctx, self._logits

    def describe(self) -> str:
        """Which op is computed by what, for the log."""
        return f"{self._ops.describe()}; attention: {self._config.attn}"

    def set_pages(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """Change the page table."""
        table = self._tables[1]
        if table.device.type == "cpu":  # numpy's indexing takes a tenth of the time
            table.numpy()[rows, columns] = pages
        else:
            entries = np.array((rows, columns, pages), dtype=np.int64)
            self.write(table, *to_device(entries, table.device).unbind())

    def sampled_places(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Forward`."""
        return _uploaded(rows, positions, self._tables[0].device)

    def run(self, batch: Batch, sampling: np.ndarray) -> None:
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
        _write(table, rows, columns, values)

    def _make_backend(
        self, pool: KVPool, page_table: torch.Tensor
    ) -> TorchBackend | FlashInferBackend:
        if self._config.attn == "torch":
            return TorchBackend(pool, page_table, self._windows)
        from minisgl.attention.flashinfer_backend import FlashInferBackend

        return FlashInferBackend(pool, page_table, self._windows, self._heads)


def _uploaded(
    rows: np.ndarray, positions: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    row, position = to_device(np.stack((rows, positions)), device).unbind()
    return row, position


def _write(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor
) -> None:
    if table.device.type == "cpu":
        table.numpy()[rows.numpy(), columns.numpy()] = values.numpy()
    else:
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
        """Bytes of the weights that a decode step reads, if every expert is chosen."""
        return self._native.weight_bytes

    def bind(self, pool: KVPool, page_table: torch.Tensor, token_pool: torch.Tensor) -> None:
        """Compute with this memory from now on."""
        self._native.bind(pool, page_table, token_pool)
        self._page_rows = page_table.numpy()

    def unbind(self) -> None:
        """Nothing is measured on a CPU, so nobody asks."""
        raise NotImplementedError("native kernels keep the memory that they are bound to")

    def describe(self) -> str:
        """For the log."""
        return "every op: kernel.cpu, one call a step"

    def set_pages(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        """Change the page table."""
        self._page_rows[rows, columns] = pages

    def sampled_places(
        self, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Forward`."""
        return torch.from_numpy(rows), torch.from_numpy(positions)

    def run(self, batch: Batch, sampling: np.ndarray) -> None:
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
        _write(table, rows, columns, values)

    def _score(self, sink: PromptLogitsSink) -> None:
        rows = sink.rows.numpy()
        for offset in range(0, len(rows), PIECE_ROWS):
            sink.collect(offset, self._native.logits(rows[offset : offset + PIECE_ROWS]))
