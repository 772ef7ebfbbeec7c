"""The process of a tensor-parallel rank other than 0: `python -m minisgl.scheduler.follower`."""

from __future__ import annotations

import os
import sys

import torch

from minisgl.config import EngineConfig
from minisgl.distributed import CommandChannel, find_store, join_group
from minisgl.models import load_model_info
from minisgl.utils.logger import configure_logging, get_logger
from minisgl.utils.mp import exit_with_parent, read_spec

from .build import make_scheduler, resolve_here
from .ranks import TIMEOUT_S, Follower, RankSpec

logger = get_logger(__name__)


def main() -> None:
    """Join the group, load this rank's share, and do as rank 0 says."""
    spec = read_spec(RankSpec)
    exit_with_parent()
    configure_logging(spec.log_level, "text")
    try:
        config, info = EngineConfig(**spec.config), load_model_info(spec.model_path)
        resolved = resolve_here(info, config)
        if resolved.device.type == "cuda":
            torch.cuda.set_device(spec.rank)
        store = find_store(spec.port, spec.size)
        join_group(spec.rank, spec.size, store, resolved.device, TIMEOUT_S)
        channel = CommandChannel()
        built = make_scheduler(spec.model_path, info, resolved)
        Follower(built.scheduler, channel).run()
    except Exception:
        logger.exception("Rank %d failed", spec.rank)
        sys.stderr.flush()
        os._exit(1)  # the group's threads may wait for peers that are gone
    os._exit(0)


if __name__ == "__main__":
    main()
