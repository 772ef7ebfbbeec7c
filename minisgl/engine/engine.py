"""`Engine`: one worker that turns batches into tokens.

launch(batch):  prepare    ids, positions, slots, attention metadata on the device
                run        model.forward() under the batch's context
                sample     one token for each request that reached its last token
                deliver    tokens into the token pool, where the next step reads them; a copy
                           of tokens and logprobs to the host, which `result()` waits for

A step may be launched before the result of the one before was read. So lengths come from the
batch's arrays; a request is asked only for what never changes, and in `launch` itself for
`num_prompt_logprobs`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from minisgl.config import ResolvedConfig
from minisgl.core import (
    Batch,
    PageWrites,
    Req,
    StepOutput,
    TokenLogprobs,
)
from minisgl.kvcache import KVPool, KVShape
from minisgl.layers import local_heads, set_rope_device
from minisgl.layers.rotary import clear_rope_cache
from minisgl.models import ModelConfig, create_model, load_weight, plan_storage, set_storage
from minisgl.models.base import BaseLLMModel
from minisgl.models.random_weights import random_weights
from minisgl.utils import div_ceil, torch_dtype
from minisgl.utils.logger import get_logger
from minisgl.utils.transfer import HostCopy, to_device

from .forward import Forward, NativeForward, make_forward
from .memory import PoolPlan, check_fits, plan_pool
from .profile import page_writes, profile_batches, sampling_requests
from .prompt_logprobs import PromptLogprobs
from .sampler import Sampled, Sampler

__all__ = ["Engine"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Step:
    """A launched forward of `size` requests: what it sampled, on its way to the host."""

    size: int
    sampling: list[int]
    """Places in the batch of the requests that sampled a token."""
    sampled: Sampled | HostCopy
    """A bare `HostCopy` where none did: the step's end on the device."""
    prompt: PromptLogprobs | None

    def result(self) -> StepOutput:
        """Wait for this step, but for none launched after it, and read tokens and logprobs."""
        token_ids: list[int | None] = [None] * self.size
        logprobs: list[TokenLogprobs | None] | None = None
        if isinstance(self.sampled, HostCopy):
            self.sampled.wait()
        else:
            tokens, entries = self.sampled.read()
            for i, token in zip(self.sampling, tokens, strict=True):
                token_ids[i] = token
            if self.sampled.logprob_rows:
                logprobs = [None] * self.size
                for i, entry in zip(self.sampling, entries, strict=True):
                    logprobs[i] = entry
        scored = None if self.prompt is None else self.prompt.by_request(self.size)
        return StepOutput(token_ids, logprobs, scored)


class Engine:
    """The model, its KV pool, the page table and the token pool of one rank.

    `token_pool [rows, max_len + 1]` int32 holds every running request's tokens, `page_table
    [rows, max_pages]` int32 its pages; a request's row is its place in both.
    """

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: ResolvedConfig,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_loaded` is called when the weights are there, before anything is computed."""
        if config.device.type == "cpu":
            torch.set_num_threads(config.threads)
        self.config = config
        self.model_config = model_config
        self._device = config.device
        self.model = _load_model(model_path, model_config, config)
        self._forward: Forward = make_forward(self.model, model_config, config)
        on_loaded()
        heads = local_heads(model_config.num_qo_heads, model_config.num_kv_heads)
        shape = KVShape(model_config.num_layers, heads[1], model_config.head_dim, config.page_size)
        self.plan: PoolPlan = plan_pool(config, shape, lambda: self._measure_peak(shape))
        self._make_tables(shape, self.plan.num_pages, self.plan.max_model_len)
        if config.triton:
            self._compile_sampler()
        logger.info(self.plan.reason)
        logger.info(self._forward.describe())

    def attach(self, req: Req) -> None:
        """Write the request's tokens into the token pool at `req.row`."""
        tokens = to_device(np.array(req.token_ids, dtype=np.int32), self._device)
        self._token_pool[req.row, : tokens.shape[0]] = tokens
        self._sampler.attach(req)

    def set_pages(self, writes: PageWrites) -> None:
        """Change entries of the page table, each at most once, and clear the fresh pages."""
        self._forward.set_pages(writes.rows, writes.columns, writes.pages)
        if writes.fresh and self._forward.reads_unused_slots:
            fresh = np.array(writes.fresh, dtype=np.int64)
            self._pool.clear(to_device(fresh, self._device))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> _Step:
        """Compute the batch and sample; `result()` of what is returned reads the tokens."""
        prompt = None
        if any(req.params.prompt_logprobs is not None for req in batch.reqs):
            prompt = PromptLogprobs(batch, self._device)
            if prompt.rows.numel():
                batch.prompt_logits = prompt
        sampling = np.flatnonzero(batch.samples)
        self._forward.run(batch, sampling)
        if not sampling.size:
            return _Step(batch.size, [], HostCopy([], self._device), prompt)
        rows, positions = batch.rows[sampling], batch.total_lens[sampling]
        places = self._forward.sampled_places(rows, positions)
        reqs = [batch.reqs[i] for i in sampling]
        if isinstance(self._forward, NativeForward) and all(r.params.plain_greedy for r in reqs):
            sampled = Sampled.plain(self._forward.greedy(sampling), self._device)
            self._forward.write(self._token_pool, *places, sampled.tokens)
        else:
            logits = self._forward.logits(sampling)
            sampled = self._sampler.sample(logits, reqs, rows, positions, places[1])
            self._forward.write(self._token_pool, *places, sampled.tokens)
            self._sampler.count(sampled.tokens, rows)
        return _Step(batch.size, sampling.tolist(), sampled, prompt)

    @property
    def num_replayed(self) -> int:
        """How many steps so far replayed a CUDA graph."""
        count: int = getattr(self._forward, "num_replayed", 0)  # of a forward that has graphs
        return count

    def close(self) -> None:
        """Give the memory of model, pool and tables back."""
        clear_rope_cache()
        del self.model, self._forward, self._pool, self._sampler, self._token_pool, self._page_table
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_tables(self, shape: KVShape, num_pages: int, max_len: int) -> None:
        config, rows = self.config, self.config.max_running_requests
        self._pool = KVPool(shape, num_pages, config.kv_dtype, self._device)
        self._page_table = torch.full(
            (rows, div_ceil(max_len, config.page_size)),
            self._pool.dummy_page,
            dtype=torch.int32,
            device=self._device,
        )
        # One more column: the token after the last one is written before the request ends.
        self._token_pool = torch.zeros((rows, max_len + 1), dtype=torch.int32, device=self._device)
        self._forward.bind(self._pool, self._page_table, self._token_pool)
        self._sampler = Sampler(
            self.model_config.vocab_size,
            self._device,
            self._token_pool,
            config.logprobs_mode,
            self._forward.drawer(),
        )

    def _compile_sampler(self) -> None:
        """Sample in every way once: a kernel's first use takes seconds, for all who run then."""
        logits = torch.zeros(
            (1, self.model_config.vocab_size), dtype=self.config.dtype, device=self._device
        )
        row, position = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        for req in sampling_requests():
            self._sampler.attach(req)
            with torch.inference_mode():
                _, sent = self._forward.sampled_places(row, position)
                sampled = self._sampler.sample(logits, [req], row, position, sent)
                self._sampler.count(sampled.tokens, row)

    def _measure_peak(self, shape: KVShape) -> int:
        """Bytes that steps need beyond weights and pool, by running the largest ones (CUDA).

        That is what they allocate at most, and what stays allocated beside the pool: captured
        graphs, compiled kernels, libraries' workspaces.
        """
        device, batches = self._device, profile_batches(self.config)
        num_pages = max(len({page for req in reqs for page in req.pages}) for reqs in batches)
        longest = max(req.device_len for reqs in batches for req in reqs)
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(device)
        self._make_tables(shape, num_pages, longest)
        tables = sum(t.nbytes for t in (self._pool.data, self._page_table, self._token_pool))
        kept = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for reqs in batches:
            for req in reqs:
                self.attach(req)
            self.set_pages(page_writes(reqs))
            self.launch(Batch(reqs)).result()
        peak = torch.cuda.max_memory_allocated(device) - kept
        torch.cuda.empty_cache()
        free_after, _ = torch.cuda.mem_get_info(device)
        stays = max(0, free_before - free_after - tables)
        self._forward.unbind()
        del self._pool, self._page_table, self._token_pool, self._sampler
        torch.cuda.empty_cache()
        return peak + stays


def _load_model(model_path: str, model_config: ModelConfig, config: ResolvedConfig) -> BaseLLMModel:
    rotary = replace(model_config.rotary_config, table_length=config.max_model_len)
    set_rope_device(config.device)
    storage = plan_storage(model_path, config.quantization, model_config)
    with torch.device("meta"), torch_dtype(config.dtype):
        # Computed in float32 with a few temporaries as large as the table.
        table_bytes = 4 * config.max_model_len * rotary.rotary_dim * torch.float32.itemsize
        check_fits(config, table_bytes, "a RoPE table for this length", "--max-model-len")
        model = create_model(replace(model_config, rotary_config=rotary))
    set_storage(model, storage)
    weight_bytes = model.num_bytes()
    check_fits(config, weight_bytes, "the weights", "the model, or --dtype bfloat16")
    tied = model_config.tie_word_embeddings
    if config.load_format == "dummy":
        source = random_weights(model, config.device)
    else:
        source = load_weight(model_path, config.device, dtype=config.dtype, storage=storage)
    weights = {
        name: tensor
        for name, tensor in source
        if not (tied and name == "lm_head.weight")  # a copy that would be held to no end
    }
    model.load_state_dict(weights)
    if storage:
        logger.info(
            f"weights: {weight_bytes / 2**20:.0f} MiB, quantized ({config.quantization}); "
            f"{model.num_params() * config.dtype.itemsize / 2**20:.0f} MiB if they were "
            f"{str(config.dtype).removeprefix('torch.')}"
        )
    if config.kernels == "auto" and not config.native:
        model.pack()
    return model
