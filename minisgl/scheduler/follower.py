"""The process of a tensor-parallel rank other than 0: `python -m minisgl.scheduler.follower`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from minisgl.config import EngineConfig
from minisgl.distributed import CommandChannel, DistributedInfo, find_store, join_group
from minisgl.models import load_model_info
from minisgl.utils.logger import configure_logging, get_logger
from minisgl.utils.mp import exit_with_parent, read_spec

from .build import make_scheduler, resolve_here
from .leading import Follower
from .nodes import SILENCE_S
from .ranks import GRACE_S, RankSpec

logger = get_logger(__name__)

_FOREVER = timedelta(days=365)
"""Whoever else dies, this process is ended."""


def main() -> None:
    """Join the group, load this rank's share, and do as rank 0 says."""
    spec = read_spec(RankSpec)
    exit_with_parent()
    configure_logging(spec.log_level, spec.log_format)
    try:
        store = find_store(spec.host, spec.port)
    except RuntimeError:
        logger.exception("Rank %d did not find rank 0", spec.rank)
        os._exit(1)
    try:
        _follow(spec, store)
    except Exception as error:
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            store.set(f"failed {spec.rank}", f"{type(error).__name__}: {error}")
        # If rank 0 failed alike, or the cause is another rank's, this process is ended meanwhile.
        time.sleep(2 * GRACE_S + (SILENCE_S if _may_be_of_a_node(error, spec) else 0))
        logger.exception("Rank %d failed", spec.rank)
        sys.stderr.flush()
        os._exit(1)  # the group's threads may wait for peers that are gone
    os._exit(0)


def _may_be_of_a_node(error: Exception, spec: RankSpec) -> bool:
    """Whether a connection may have broken with another node, of which others will hear late."""
    return spec.config["nnodes"] > 1 and (
        type(error) is RuntimeError or isinstance(error, dist.DistError)
    )


def _follow(spec: RankSpec, store: Store) -> None:
    config, model = EngineConfig(**spec.config), load_model_info(spec.model_path)
    resolved = resolve_here(model, config)
    if resolved.device.type == "cuda":
        torch.cuda.set_device(spec.rank % config.ranks_per_node)
    store.set(f"here {spec.rank}", "")
    info = DistributedInfo(spec.rank, config.tp, config.ep)
    one_host = config.nnodes == 1
    join_group(info, store, resolved.device, spec.timeout_s, one_host=one_host)
    channel = CommandChannel(spec.timeout_s)

    def on_loaded() -> None:
        """Others may be slower by more than a collective waits."""
        store.set(f"loaded {spec.rank}", "")
        store.wait(["all loaded"], _FOREVER)

    built = make_scheduler(spec.model_path, model, resolved, on_loaded)
    store.set(f"ready {spec.rank}", "")
    Follower(built.scheduler, channel).run()
    if resolved.device.type == "cuda":
        torch.cuda.synchronize()  # others wait for this rank's part of what was launched


if __name__ == "__main__":
    main()
