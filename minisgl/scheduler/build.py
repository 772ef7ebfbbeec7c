"""A scheduler with its engine and cache, from a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.engine import Engine
from minisgl.kernel.cpu import has_native
from minisgl.kvcache import CACHES
from minisgl.models import ModelInfo
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware
from minisgl.utils.logger import get_logger

from .planner import Limits
from .scheduler import Scheduler

__all__ = ["Built", "build_scheduler"]

logger = get_logger(__name__)


class Built(NamedTuple):
    """What runs requests on this machine."""

    scheduler: Scheduler
    engine: Engine
    config: ResolvedConfig


def build_scheduler(path: str, info: ModelInfo, config: EngineConfig) -> Built:
    """Load the model at `path`, described by `info`; the reasons of what was chosen are logged."""
    hardware = Hardware.detect()
    facts = info.facts()
    on_cpu = config.device == "cpu" or (config.device == "auto" and not hardware.has_cuda)
    if on_cpu and config.kernels == "auto" and facts.is_dense:  # only then: it may compile them
        hardware = replace(hardware, has_native=has_native())
    resolved = resolve(config, hardware, facts)
    for reason in resolved.reasons:
        logger.info(reason)
    engine = Engine(path, info.config, resolved)
    plan = engine.plan
    scheduler = Scheduler(
        engine,
        CACHES[resolved.cache](plan.num_pages, resolved.page_size),
        Limits(resolved.max_running_requests, resolved.max_prefill_length, plan.max_model_len),
        policy=resolved.schedule_policy,
        overlap=resolved.overlap,
    )
    return Built(scheduler, engine, resolved)
