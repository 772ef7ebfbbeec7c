"""`minisgl bench kernel`: each kernel's time beside what the machine's ceilings allow.

A kernel is timed in a CUDA graph, where the engine runs it too, over as many sets of inputs as
make caches useless: the next call reads what no call has touched for a while. Inputs are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from minisgl.errors import ConfigError
from minisgl.models import ModelConfig

from .kernel_cases import Case, Draw, Work, kernel_cases
from .limits import Ceilings, measure_ceilings
from .shapes import SHAPES

__all__ = ["bench_kernels", "choose", "figures", "measure", "num_calls", "num_sets"]

DTYPE = torch.bfloat16
CACHE_BYTES = 60 << 20
"""The second-level cache of an H200; others have less."""
MAX_SETS = 32
"""What is so small that even these fit into the cache is there in the engine as well."""
GRAPH_S = 2e-3
"""About how long a graph is to run: long beside its start, which takes microseconds."""
LAUNCH_S = 3e-6
"""What the shortest kernel takes."""
MAX_CALLS = 512
REPLAYS = 9


def bench_kernels(shape: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Time the kernels of these names, or all, in the shape's sizes.

    A case that can't run is a row with its `error`. Raises `ConfigError` without a CUDA device
    and for a name that no kernel has.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench kernel needs a CUDA device, and torch sees none here")
    device = torch.device("cuda")
    model = ModelConfig.from_hf(SimpleNamespace(**SHAPES[shape]))
    chosen = choose(kernel_cases(Draw(model, device, DTYPE)), names)
    ceilings = measure_ceilings(device, DTYPE)
    return {
        "benchmark": "kernel",
        "shape": shape,
        "dtype": str(DTYPE).removeprefix("torch."),
        "machine": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "copy_gb_per_s": round(ceilings.bytes_per_s / 1e9, 1),
        "gemm_tflop_per_s": round(ceilings.flops_per_s / 1e12, 1),
        "rows": [measure(case, ceilings) for case in chosen],
    }


def choose(cases: list[Case], names: Sequence[str]) -> list[Case]:
    """The cases of these kernels, or all; raises `ConfigError` for a name that none has."""
    known = dict.fromkeys(case.kernel for case in cases)
    for name in names:
        if name not in known:
            raise ConfigError(f"--kernel {name!r}: choose from {', '.join(known)}")
    return [case for case in cases if not names or case.kernel in names]


def figures(work: Work, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """A call's time with its rates, and the share of the ceiling that is the nearer one."""
    copy_s, gemm_s = work.bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s
    return {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(work.bytes / seconds / 1e9, 1),
        "tflop_per_s": round(work.flops / seconds / 1e12, 2),
        "share": round(max(copy_s, gemm_s) / seconds, 4),
        "ceiling": "GEMM" if gemm_s > copy_s else "copy",
    }


def num_sets(work: Work) -> int:
    """Sets of inputs whose first is out of the cache when its turn comes again."""
    return min(MAX_SETS, 1 + 2 * CACHE_BYTES // work.bytes)


def num_calls(work: Work, sets: int, ceilings: Ceilings) -> int:
    """Calls in a graph: each set as often as the others."""
    least_s = work.bytes / ceilings.bytes_per_s + work.flops / ceilings.flops_per_s + LAUNCH_S
    return sets * max(1, round(min(MAX_CALLS, GRAPH_S / least_s) / sets))


def measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """A case's row: its figures, or the error that kept it from running."""
    row: dict[str, Any] = {"kernel": case.kernel, "sizes": case.sizes}
    try:
        first = case.make()
        works = [first, *(case.make() for _ in range(num_sets(first) - 1))]
        calls = num_calls(first, len(works), ceilings)
        row |= figures(first, _graph_s([work.call for work in works], calls), ceilings)
    except Exception as error:  # one that fails must not cost the other figures
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def _graph_s(calls: Sequence[Callable[[], object]], count: int) -> float:
    """Seconds of a call: the median of some replays of a graph of `count` calls, taken in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and lets libraries choose
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    times_ms: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms) / 1000 / count
