"""Which steps are captured, which captured step takes a batch, and the capture itself.

On a machine without CUDA the capture runs with stand-ins for torch's graphs and streams: a fake
graph records the value that its `compute` depends on, as a real one records launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine import cuda_graphs
from minisgl.engine.cuda_graphs import CudaGraphs, Shape, graph_shapes

CPU = torch.device("cpu")


def split(shapes: Sequence[Shape]) -> tuple[list[Shape], list[Shape]]:
    """The shapes of decode steps and those of mixed ones."""
    return [s for s in shapes if not s.is_prefill], [s for s in shapes if s.is_prefill]


@given(st.integers(1, 600), st.integers(0, 400), st.integers(0, 9000), st.booleans())
def test_ladder(max_bs: int, more_reqs: int, more_tokens: int, deterministic: bool) -> None:
    max_reqs = max_bs + more_reqs
    max_tokens = max_reqs + more_tokens
    decode, mixed = split(graph_shapes(max_bs, max_reqs, max_tokens, deterministic))
    sizes = [shape.num_tokens for shape in decode]
    assert sizes == sorted({*sizes})
    assert (sizes[0], sizes[-1]) == (1, max_bs)
    # Padding is at most half of a small step, a tenth or so of a large one.
    for smaller, larger in zip(sizes, sizes[1:], strict=False):
        assert larger <= 2 * smaller or larger - smaller <= 16
        assert larger - smaller <= max(32, smaller // 4)
    for size, reqs, decodes, _ in decode:
        assert (reqs, decodes) == (size, 0 if deterministic else size)

    tokens = [shape.num_tokens for shape in mixed]
    assert tokens == sorted({*tokens})
    assert all(count <= max_tokens for count in tokens)
    assert bool(tokens) == (max_tokens >= 64)
    for count, reqs, decodes, _ in mixed:
        # As many requests as there can be: each has a token at least.
        assert reqs == min(count, max_reqs)
        assert decodes == (0 if deterministic else reqs)


def test_shapes_of_the_defaults() -> None:
    decode, mixed = split(graph_shapes(256, 256, 8192, False))
    assert [shape.num_tokens for shape in decode] == [
        *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    ]
    assert mixed[0] == Shape(64, 64, 64, True)
    assert mixed[-1] == Shape(2048, 256, 256, True)


def test_none_are_asked_for() -> None:
    assert graph_shapes(0, 256, 8192, False) == []
    graphs = CudaGraphs(forbidden, [], CPU)
    assert len(graphs) == 0
    assert graphs.find(1, 1, False) is graphs.find(64, 2, True) is None


def forbidden(shape: Shape) -> torch.Tensor:
    raise AssertionError(f"{shape} is not to be captured")


class FakeGraph:
    """Keeps what `compute` did between `capture_begin` and `capture_end`, and does it again."""

    made: list[FakeGraph] = []

    def __init__(self) -> None:
        self.done: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.pool: object = None
        FakeGraph.made.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads use the device meanwhile"
        self.pool = pool
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")

    def replay(self) -> None:
        for action in self.done:
            action()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda_graphs` sees a torch whose CUDA is made up."""
    FakeGraph.made = []
    cuda = SimpleNamespace(
        CUDAGraph=FakeGraph,
        Stream=lambda device: object(),
        stream=lambda stream: nullcontext(),
        graph_pool_handle=object,
        synchronize=lambda device: None,
        empty_cache=lambda: None,
    )
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=cuda))


def launch(memory: dict[str, int], calls: list[Shape]) -> Callable[[Shape], torch.Tensor]:
    """A forward that fills its output with `memory["step"]`, and does so when replayed."""

    def compute(shape: Shape) -> torch.Tensor:
        calls.append(shape)
        out = torch.zeros(shape.num_reqs, dtype=torch.int64)

        def run() -> None:
            out.fill_(memory["step"])

        run()
        if FakeGraph.made and FakeGraph.made[-1].calls == ["begin"]:
            FakeGraph.made[-1].done.append(run)
        return out

    return compute


def test_capture_warms_up_each_shape_and_the_largest_first(fake_cuda) -> None:
    calls: list[Shape] = []
    shapes = graph_shapes(5, 6, 130, False)
    graphs = CudaGraphs(launch({"step": 0}, calls), shapes, CPU)
    assert len(graphs) == len(shapes) == len(FakeGraph.made)
    assert calls[::2] == calls[1::2], "once to compile, once captured"
    assert {*calls} == {*shapes}
    tokens = [shape.num_tokens for shape in calls]
    assert tokens == sorted(tokens, reverse=True)
    assert len({id(graph.pool) for graph in FakeGraph.made}) == 1, "their buffers overlap"
    assert all(graph.calls == ["begin", "end"] for graph in FakeGraph.made)


def test_replay_computes_with_what_memory_holds_now(fake_cuda) -> None:
    memory: dict[str, int] = {"step": 0}
    graphs = CudaGraphs(launch(memory, []), graph_shapes(4, 4, 64, False), CPU)
    for step, (tokens, reqs) in enumerate(((3, 3), (1, 1), (60, 2), (3, 3)), 1):
        memory["step"] = step
        shape = graphs.find(tokens, reqs, tokens > reqs)
        assert shape is not None
        assert graphs.replay(shape).tolist() == [step] * shape.num_reqs


def test_a_capture_that_fails_is_ended(fake_cuda) -> None:
    failing = iter((False, True))

    def compute(shape: Shape) -> torch.Tensor:
        if next(failing):
            raise MemoryError("no room")
        return torch.zeros(1)

    with pytest.raises(MemoryError, match="no room"):
        CudaGraphs(compute, [Shape(1, 1, 1, False)], CPU)
    assert [graph.calls for graph in FakeGraph.made] == [["begin", "end"]]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("max_bs", "max_reqs", "max_tokens"), [(1, 1, 64), (5, 6, 130), (40, 40, 40), (8, 300, 200)]
)
def test_find_takes_the_smallest_that_holds_the_step(
    fake_cuda, max_bs, max_reqs, max_tokens, deterministic
) -> None:
    shapes = graph_shapes(max_bs, max_reqs, max_tokens, deterministic)
    graphs = CudaGraphs(launch({"step": 0}, []), shapes, CPU)
    decode, mixed = split(shapes)
    for reqs in range(1, max_reqs + 1):
        fitting = [shape for shape in decode if shape.num_reqs >= reqs]
        assert graphs.find(reqs, reqs, False) == min(fitting, default=None)
        for tokens in {reqs + 1, (reqs + max_tokens) // 2, max_tokens, max_tokens + 1, 10**6}:
            if tokens > reqs:
                fitting = [s for s in mixed if s.num_tokens >= tokens and s.num_reqs >= reqs]
                assert graphs.find(tokens, reqs, True) == min(fitting, default=None)


def test_a_shape_of_too_few_requests_holds_nothing(fake_cuda) -> None:
    graphs = CudaGraphs(launch({"step": 0}, []), [Shape(64, 2, 2, True)], CPU)
    assert graphs.find(10, 2, True) == Shape(64, 2, 2, True)
    assert graphs.find(10, 3, True) is None
    assert graphs.find(2, 2, False) is None, "a decode step goes by other kernels"


@pytest.mark.gpu
def test_graphs_share_memory_and_read_it_anew() -> None:
    device = torch.device("cuda")
    numbers = torch.arange(64.0, device=device)

    def compute(shape: Shape) -> torch.Tensor:
        # The intermediate is larger than the output: the pool's memory is used again.
        return (numbers[: shape.num_tokens, None] * numbers).sum(1) + shape.num_tokens

    shapes = graph_shapes(32, 32, 64, False)
    graphs = CudaGraphs(compute, shapes, device)
    for step in range(3):
        for shape in (*shapes, *reversed(shapes)):
            numbers.copy_(torch.arange(64.0) + step)
            found = graphs.replay(shape)
            assert torch.equal(found, compute(shape))
