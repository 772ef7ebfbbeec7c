"""How many pages the KV pool gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl.config import ResolvedConfig
from minisgl.distributed import DistributedCommunicator
from minisgl.errors import ConfigError
from minisgl.kvcache import KVShape
from minisgl.utils import div_ceil
from minisgl.utils.hardware import available_memory_bytes

__all__ = ["PoolPlan", "check_fits", "plan_pool"]


@dataclass(frozen=True)
class PoolPlan:
    """Pages of the pool and the longest sequence they allow."""

    num_pages: int
    max_model_len: int
    reason: str


def check_fits(config: ResolvedConfig, size_bytes: int, what: str, change: str) -> None:
    """Raise `ConfigError` if the device has not this much memory left; `change` says what helps."""
    if config.device.type == "cpu":
        available = available_memory_bytes()
    else:
        available = torch.cuda.mem_get_info(config.device)[0]
    if size_bytes > available:
        raise ConfigError(
            f"{what}: {size_bytes / 2**30:.1f} GiB needed, {available / 2**30:.1f} GiB available; "
            f"choose a smaller {change}"
        )


def plan_pool(config: ResolvedConfig, shape: KVShape, measure_peak: Callable[[], int]) -> PoolPlan:
    """Size the pool from what is free after the weights.

    `measure_peak` runs the largest forward on a CUDA device and returns the bytes it needed
    beyond the weights. Without a prefix cache, more pages than all requests at full length could
    use are never made; with one, what they leave holds the prefixes of others.
    A pool too small for a length that the user asked for is a `ConfigError`; a length that
    only the model's config names is shortened to what fits. Where not even a step fits, it is a
    `ConfigError` too: with the plain backend on CUDA, whose last chunk sees all of a prompt, also
    for a length that only the model's config names.
    """
    page_bytes = shape.page_bytes(config.kv_dtype)
    pages_each = div_ceil(config.max_model_len, config.page_size)
    useful = pages_each * config.max_running_requests
    if config.num_pages is not None:
        pages, reason = config.num_pages, f"num_pages = {config.num_pages} as asked"
        check_fits(config, pages * page_bytes, "the KV cache", "--num-pages")
    else:
        budget = _budget_bytes(config, page_bytes, measure_peak)
        gathered = _gathered_bytes(config, shape)
        # Ranks decide alike only with as many pages each.
        fitting = budget // (page_bytes + gathered)
        pages = DistributedCommunicator().smallest(fitting, config.device)
        reason = f"num_pages = {pages}: {budget / 2**30:.2f} GiB for pages of {page_bytes} bytes"
        if gathered:
            reason += f" and {gathered} beside each, where attention gathers them"
        if config.cache == "naive" and pages > useful:
            pages, reason = useful, f"num_pages = {useful}: what all requests can use at once"
    length = min(config.max_model_len, pages * config.page_size)
    if length < config.max_model_len and (config.max_model_len_asked or length < 2):
        raise ConfigError(
            f"The KV cache holds {pages} pages of {config.page_size} tokens "
            f"({pages * page_bytes / 2**20:.0f} MiB), {pages * config.page_size} tokens; one "
            f"request of --max-model-len {config.max_model_len} needs {pages_each} pages "
            f"({pages_each * page_bytes / 2**20:.0f} MiB). Lower --max-model-len or raise "
            "--memory-ratio or --num-pages"
        )
    check_fits(config, _table_bytes(config, length), "the request tables", "--max-running-requests")
    return PoolPlan(pages, length, reason)


def _gathered_bytes(config: ResolvedConfig, shape: KVShape) -> int:
    """For each page, what lies beside it when all requests decode: the plain backend copies one
    layer of their pages, and pads shorter requests, at most to twice as much or so."""
    if config.device.type == "cpu" or config.attn != "torch":
        return 0
    return 2 * shape.page_bytes(config.kv_dtype) // shape.num_layers


def _table_bytes(config: ResolvedConfig, length: int) -> int:
    """Of the token pool and the page table, int32, for sequences of `length` tokens."""
    row = length + 1 + div_ceil(length, config.page_size)
    return torch.int32.itemsize * row * config.max_running_requests


def _budget_bytes(config: ResolvedConfig, page_bytes: int, measure_peak: Callable[[], int]) -> int:
    """For pages: on a CPU a share of the memory; on CUDA what all else leaves of the share."""
    if config.device.type == "cpu":
        return int(available_memory_bytes() * config.memory_ratio * config.nnodes / config.tp)
    free, total = torch.cuda.mem_get_info(config.device)
    try:
        peak = measure_peak()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the largest step does not fit in the {free / 2**30:.1f} GiB that the weights left: "
            "lower --max-prefill-length, --max-running-requests or --max-model-len"
        ) from error
    # The share is of the whole card: what weights and others took is gone already. Beside the
    # pages there are the dummy page and the request tables.
    others = peak + page_bytes + _table_bytes(config, config.max_model_len)
    return max(0, int(free - total * (1 - config.memory_ratio)) - others)
