"""A scheduler with its engine and cache, from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.distributed import get_tp_info
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.kernel.cpu import has_native
from minisgl.kvcache import CACHES
from minisgl.models import ModelInfo
from minisgl.resolve import resolve
from minisgl.utils.hardware import Hardware
from minisgl.utils.logger import get_logger

from .planner import Limits
from .scheduler import Scheduler

if TYPE_CHECKING:  # one rank needs no processes and their messages
    from .ranks import Ranks

__all__ = ["Built", "build_scheduler", "make_scheduler", "resolve_here"]

logger = get_logger(__name__)


class Built(NamedTuple):
    """What runs requests on this machine."""

    scheduler: Scheduler
    engine: Engine
    config: ResolvedConfig
    ranks: Ranks | None = None
    """The others' processes, where there are any."""

    def close(self) -> None:
        """End the other ranks, if there are any, and give the memory back."""
        self.scheduler.close()
        self.engine.close()
        # Only now: NCCL's group does not end before the graphs that hold its calls.
        if self.ranks is not None:
            self.ranks.leave()


def build_scheduler(path: str, info: ModelInfo, config: EngineConfig) -> Built:
    """Load the model at `path`, described by `info`; the reasons of what was chosen are logged.

    With several ranks this process becomes rank 0, and the others' processes are started; those
    of other nodes are waited for.
    """
    if config.node_rank:
        raise ConfigError(
            f"--node-rank {config.node_rank}: only node 0 answers requests; this node holds ranks "
            f"for it, so run `minisgl serve ... --node-rank {config.node_rank}` here"
        )
    resolved = resolve_here(info, config)
    for reason in resolved.reasons:
        logger.info(reason)
    if get_tp_info().size > 1:
        raise ConfigError(
            f"this process is a rank of an engine with --tp {get_tp_info().size}: close that first"
        )
    if resolved.tp == 1:
        return make_scheduler(path, info, resolved)
    from .nodes import make_facts
    from .ranks import Ranks

    ranks, built = Ranks(path, config, resolved.device, make_facts(info, config, resolved)), None
    try:
        with ranks.failing_together():
            built = make_scheduler(path, info, resolved, ranks.all_loaded, ranks)
            ranks.wait_for("ready")
    except BaseException as error:
        ranks.close(why=f"node 0 did not start: {type(error).__name__}: {error}")
        if built is not None:
            built.engine.close()
        ranks.leave()
        raise
    return built


def resolve_here(info: ModelInfo, config: EngineConfig) -> ResolvedConfig:
    """The configuration for this machine."""
    hardware = Hardware.detect()
    facts = info.facts()
    on_cpu = config.device == "cpu" or (config.device == "auto" and not hardware.has_cuda)
    # Asked only where they would run: it may compile them.
    if on_cpu and config.kernels == "auto" and config.tp == 1:
        hardware = replace(hardware, has_native=has_native())
    return resolve(config, hardware, facts)


def make_scheduler(
    path: str,
    info: ModelInfo,
    resolved: ResolvedConfig,
    on_loaded: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> Built:
    """This rank's engine, and a scheduler that leads `ranks` if there are any; `on_loaded` is
    `Engine`'s."""
    engine = Engine(path, info.config, resolved, on_loaded)
    plan = engine.plan
    parts = (
        engine,
        CACHES[resolved.cache](plan.num_pages, resolved.page_size),
        Limits(resolved.max_running_requests, resolved.max_prefill_length, plan.max_model_len),
    )
    policy, overlap = resolved.schedule_policy, resolved.overlap
    if ranks is not None:
        from .leading import LeadingScheduler

        leading = LeadingScheduler(*parts, ranks, policy=policy, overlap=overlap)
        return Built(leading, engine, resolved, ranks)
    return Built(Scheduler(*parts, policy=policy, overlap=overlap), engine, resolved)
