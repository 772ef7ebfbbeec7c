"""`minisgl bench kernel`: what cases count, how often they run, figures, table, refusals."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.benchmark import kernels
from minisgl.benchmark.kernel_cases import (
    PAGE_SIZE,
    Case,
    Draw,
    Work,
    decode_lengths,
    kernel_cases,
    sized_kernels,
)
from minisgl.benchmark.limits import Ceilings, attention_flops
from minisgl.benchmark.shapes import SHAPES
from minisgl.benchmark.workloads import reference_workload
from minisgl.cli import main
from minisgl.errors import ConfigError
from minisgl.models import ModelConfig
from minisgl.utils import div_ceil

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CEILINGS = Ceilings(4e12, 8e14)
HIDDEN, INNER, HEADS, KV_HEADS, D = 64, 96, 4, 2, 16
VOCAB = 300  # far less than any model has: the interpreter is slow
QKV = (HEADS + 2 * KV_HEADS) * D
ROWS = 3
LENGTHS = decode_lengths(ROWS)
LINEARS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HEADS * D),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}


def draw(shape: str = "tiny", **changes: Any) -> Draw:
    """Inputs in float32, whose elements have four bytes."""
    raw = {**SHAPES[shape], "vocab_size": VOCAB, **changes}
    return Draw(ModelConfig.from_hf(SimpleNamespace(**raw)), DEVICE, torch.float32)


def expected() -> dict[str, tuple[int, int]]:
    """Bytes and operations of each kernel with 3 rows; prefill with 2 prompts of 5."""
    keys = 2 * KV_HEADS * D * 4
    found = {
        "rmsnorm": (4 * HIDDEN * (2 * ROWS + 1), 0),
        "fused_add_rmsnorm": (4 * HIDDEN * (4 * ROWS + 1), 0),
        # A position and a slot of 8 bytes, D angles of 4.
        "qk_norm_rope_store": (ROWS * (2 * 4 * QKV + 16 + 4 * D), 0),
        "silu_and_mul": (ROWS * 4 * 3 * INNER, 0),
        "indexing": (ROWS * (2 * 4 * HIDDEN + 8), 0),
        "choose_tokens": (ROWS * 4 * VOCAB, 0),
        "find_thresholds": (ROWS * 4 * VOCAB, 0),
        "decode_attention": (
            2 * ROWS * HEADS * D * 4 + sum(LENGTHS) * keys,
            4 * HEADS * D * sum(LENGTHS),
        ),
        "prefill_attention": (
            2 * 10 * HEADS * D * 4 + 10 * keys,
            2 * attention_flops(draw(num_hidden_layers=1).model, 0, 5),
        ),
    }
    for name, (out, size) in LINEARS.items():
        counts = (4 * (ROWS * (size + out) + out * size), 2 * ROWS * out * size)
        found |= {f"linear {name}": counts, f"invariant {name}": counts}
    return found


# -- cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", expected())
def test_a_case_runs_and_counts_what_it_needs(name: str) -> None:
    """Also that the kernel takes the case's arguments, interpreted where there is no GPU."""
    [kernel] = [kernel for kernel in sized_kernels(draw().model) if kernel.name == name]
    work = kernel.make(draw(), *((2, 5) if name == "prefill_attention" else (ROWS,)))
    assert (work.bytes, work.flops) == expected()[name]
    result = work.call()
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        assert result.isfinite().all() and result.std() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_has_its_cases(shape: str) -> None:
    cases = kernel_cases(draw(shape))
    names = set(expected())
    if draw(shape).model.is_moe:  # experts are no linear layers
        names = {name for name in names if not name.endswith((" gate_up", " down"))}
    assert {case.kernel for case in cases} == names
    assert len({(case.kernel, case.sizes) for case in cases}) == len(cases)
    sizes = [case.sizes for case in cases if case.kernel == "prefill_attention"]
    assert sizes == ["B 1, n 8,192", "B 16, n 1,024"]


def test_models_without_qk_norm_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl.kernel.triton import rope

    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rope, "qk_norm_rope_store", lambda *arguments: given.append(arguments))
    small = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    for shape in ("llama-3.1-8b", "tiny"):
        [kernel] = [k for k in sized_kernels(draw().model) if k.name == "qk_norm_rope_store"]
        kernel.make(draw(shape, **small, head_dim=D), ROWS).call()
    assert given[0][9:11] == (None, None)
    assert all(weight.shape == (D,) for weight in given[1][9:11])


def test_pages_hold_every_request_once() -> None:
    lengths = [1, PAGE_SIZE, PAGE_SIZE + 1, 50]
    keys = draw().paged(lengths)
    counts = [div_ceil(length, PAGE_SIZE) for length in lengths]
    used = [keys.page_table[row, :count].tolist() for row, count in enumerate(counts)]
    assert sorted(sum(used, [])) == list(range(sum(counts)))
    assert keys.k_pages.shape == (sum(counts), PAGE_SIZE, KV_HEADS, D)
    assert keys.seq_lens.tolist() == lengths
    assert keys.page_table.dtype == keys.rows.dtype == keys.seq_lens.dtype == torch.int32


def test_decoding_requests_are_the_workloads() -> None:
    jobs = reference_workload(256)
    lengths = decode_lengths(256)
    for job, length in zip(jobs, lengths, strict=True):
        assert len(job.prompt) < length < len(job.prompt) + job.output_len
    assert sum(lengths) / 256 == pytest.approx(820, abs=5)


# -- how often, and what of it -------------------------------------------------------------


def test_inputs_leave_the_cache_before_their_turn() -> None:
    for size in (1, 1 << 10, 1 << 20, 7 << 20, 1 << 30):
        work = Work(lambda: None, size)
        sets = kernels.num_sets(work)
        assert sets == kernels.MAX_SETS or (sets - 1) * size >= 2 * kernels.CACHE_BYTES - size
        assert 1 <= sets <= kernels.MAX_SETS
        calls = kernels.num_calls(work, sets, CEILINGS)
        assert calls % sets == 0 and sets <= calls <= kernels.MAX_CALLS + sets


def test_long_kernels_run_less_often() -> None:
    short, long = Work(lambda: None, 1 << 20), Work(lambda: None, 1 << 30, 10**12)
    assert kernels.num_calls(short, 32, CEILINGS) == 512
    assert kernels.num_calls(long, 1, CEILINGS) == 1


@pytest.mark.parametrize(
    ("size", "flops", "share", "ceiling"),
    [(4 * 10**6, 10**6, 0.25, "copy"), (10**3, 4 * 10**8, 0.125, "GEMM")],
)
def test_the_share_is_of_the_nearer_ceiling(
    size: int, flops: int, share: float, ceiling: str
) -> None:
    found = kernels.figures(Work(lambda: None, size, flops), 4e-6, CEILINGS)
    assert (found["us"], found["share"], found["ceiling"]) == (4.0, share, ceiling)
    assert found["gb_per_s"] == round(size / 4e-6 / 1e9, 1)
    assert found["tflop_per_s"] == round(flops / 4e-6 / 1e12, 2)


# -- rows and tables -----------------------------------------------------------------------


def test_a_kernel_that_fails_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(fails: bool) -> Work:
        if fails:
            raise RuntimeError("no such tile")
        return Work(lambda: None, 8 * 10**6)

    monkeypatch.setattr(kernels, "_graph_s", lambda calls, count: 4e-6)
    good = kernels.measure(Case("good", "T 1", functools.partial(make, False)), CEILINGS)
    assert (good["kernel"], good["sizes"], good["share"]) == ("good", "T 1", 0.5)
    bad = kernels.measure(Case("bad", "T 1", functools.partial(make, True)), CEILINGS)
    assert bad == {"kernel": "bad", "sizes": "T 1", "error": "RuntimeError: no such tile"}


def results() -> dict[str, Any]:
    row = {"kernel": "rmsnorm", "sizes": "T 8,192", "us": 12.345, "gb_per_s": 2718.3}
    row |= {"tflop_per_s": 1.23, "share": 0.6395, "ceiling": "copy"}
    return {
        "shape": "qwen3-0.6b", "dtype": "bfloat16", "machine": "NVIDIA H200",
        "copy_gb_per_s": 4250.6, "gemm_tflop_per_s": 751.2,
        "rows": [row, {"kernel": "head", "sizes": "M 1", "error": "RuntimeError: no [tile]"}],
    }  # fmt: skip


def test_the_table_shows_figures_and_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "bench_kernels", lambda shape, names: results())
    assert main(["bench", "kernel"]) == 1, "a kernel failed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen3-0.6b, bfloat16 on NVIDIA H200"
    assert lines[1] == "copy 4,250.6 GB/s, read and write counted; GEMM 751.2 TFLOP/s"
    [row] = [line for line in lines if "rmsnorm" in line]
    for text in ("T 8,192", "12.3", "2,718", "1.2", "64%", "copy"):
        assert text in row
    assert lines[-1] == "head, M 1: RuntimeError: no [tile]"


def test_names_choose_kernels() -> None:
    cases = kernel_cases(draw())
    assert kernels.choose(cases, ()) == cases
    some = kernels.choose(cases, ["linear head", "rmsnorm"])
    assert {case.kernel for case in some} == {"linear head", "rmsnorm"}
    with pytest.raises(ConfigError, match=r"--kernel 'norm': choose from rmsnorm, .*linear head"):
        kernels.choose(cases, ["rmsnorm", "norm"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel", "--shape", "tiny"]) == 2
    assert "bench kernel needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu() -> None:
    found = kernels.bench_kernels("tiny", ["rmsnorm", "linear o", "decode_attention"])
    assert [row for row in found["rows"] if "error" in row] == []
    assert all(row["share"] > 0 and row["us"] > 0 for row in found["rows"])
