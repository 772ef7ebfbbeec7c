"""`python -m tests.gpu.rank_process JSON`: one rank of an engine whose ranks share a single GPU.

NCCL takes a GPU for each rank, so with several the group is gloo's here, and everything that steps
reduce goes through peers' memory. What a run generates is rank 0's last line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minisgl.config import EngineConfig
from minisgl.core import Req, SamplingParams
from minisgl.distributed import (
    DistributedCommunicator,
    DistributedInfo,
    find_store,
    set_tp_info,
)
from minisgl.distributed.impl import use_peers
from minisgl.distributed.peers import PeerMemory, measure
from minisgl.models import load_model_info
from minisgl.resolve import resolve
from minisgl.scheduler.build import make_scheduler
from minisgl.utils.hardware import Hardware

PEER_BYTES = 16 << 20
"""Room for whatever a step of a small model reduces or gathers."""


def generate(run: dict[str, Any], size: int) -> list[list[int]]:
    """Greedy ids of all prompts, by this rank's scheduler: every rank makes the same calls."""
    info = load_model_info(run["model"])
    config = EngineConfig(tp=size, device="cuda", **run["options"])
    hardware = replace(Hardware.detect(), num_gpus=size)
    built = make_scheduler(run["model"], info, resolve(config, hardware, info.facts()))
    params = SamplingParams(temperature=0.0, ignore_eos=True).resolve_defaults({})
    for uid, ids in enumerate(run["prompts"]):
        length = len(ids)
        req = Req(uid, list(ids), length, params, max_len=length + run["max_tokens"])
        built.scheduler.add(req)
    found: list[list[int]] = [[] for _ in run["prompts"]]
    while built.scheduler.has_work:
        for update in built.scheduler.step():
            if update.token_id is not None:
                found[update.uid].append(update.token_id)
    built.close()
    return found


def gather_by_peers(peers: PeerMemory, rank: int, size: int) -> None:
    """Gather by a sum with zeros: gloo's all_gather can't be captured."""

    def all_gather(self: DistributedCommunicator, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros((size, *x.shape))
        out[rank] = x
        peers.all_reduce(out)
        return out.flatten(0, 1)

    DistributedCommunicator.all_gather = all_gather  # type: ignore[method-assign]


def run_ranks(spec: dict[str, Any]) -> list[list[list[int]]]:
    """Several runs, one after the other."""
    rank, size, found = spec["rank"], spec["size"], []
    peers = PeerMemory(torch.device("cuda", 0), PEER_BYTES)
    use_peers(peers)
    gather_by_peers(peers, rank, size)
    for run in spec["runs"]:
        set_tp_info(DistributedInfo(rank, size, run["options"].get("ep", False)))
        found.append(generate(run, size))
        set_tp_info(None)
    return found


def run_alone(spec: dict[str, Any]) -> dict[str, Any]:
    """A group of one by NCCL, whose collectives steps and their graphs call all the same."""

    def all_reduce(self: DistributedCommunicator, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def broadcast(self: DistributedCommunicator, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, 0)
        return x

    DistributedCommunicator.all_reduce = all_reduce  # type: ignore[method-assign]
    DistributedCommunicator.broadcast = broadcast  # type: ignore[method-assign]
    found = [generate(run, 1) for run in spec["runs"]]
    timings = measure(PeerMemory(torch.device("cuda", 0)))
    return {"found": found, "timings": timings}


def lose_a_rank(spec: dict[str, Any]) -> float:
    """Rank 1 ends while rank 0 waits for it on the device; seconds until that is let go."""
    peers, x = PeerMemory(torch.device("cuda", 0)), torch.ones(64, device="cuda")
    peers.all_reduce(x)
    torch.cuda.synchronize()
    if spec["rank"] == 1:
        os._exit(0)
    time.sleep(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            peers.all_reduce(x)
    graph.replay()
    begin, end = time.monotonic(), torch.cuda.Event()
    end.record()
    time.sleep(1)
    assert not end.query(), "nothing was waited for"
    threading.Thread(target=peers.release, daemon=True).start()
    peers.close()
    assert end.query()
    return time.monotonic() - begin


def main() -> None:
    spec = json.loads(sys.argv[1])
    rank, size = spec["rank"], spec["size"]
    torch.cuda.set_device(0)
    store = find_store("127.0.0.1", spec["port"])
    dist.init_process_group(
        "gloo" if size > 1 else "nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    does = {"ranks": run_ranks, "alone": run_alone, "lose": lose_a_rank}[spec["does"]]
    print(json.dumps(does(spec)), flush=True)
    os._exit(0)  # the others may be gone: no farewells


if __name__ == "__main__":
    main()
