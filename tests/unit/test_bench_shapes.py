"""`minisgl bench offline --shape`: shapes, workload, limit, random weights, figures, flags."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.benchmark import limits, reference
from minisgl.benchmark.limits import Ceilings
from minisgl.benchmark.report import print_shape_table
from minisgl.benchmark.shapes import SHAPES, write_shape
from minisgl.benchmark.workloads import Job, reference_workload
from minisgl.cli import main
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.layers import set_rope_device
from minisgl.models import ModelConfig, create_model, load_model_info
from minisgl.models.random_weights import random_weights
from minisgl.utils import torch_dtype

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
H200 = Ceilings(4.26e12, 750e12)
SMALL = [Job([1, 2, 3, 4, 5], 4), Job([7, 8], 6), Job([9] * 40, 1)]
CPU = ["--device", "cpu", "--kernels", "reference", "--num-pages", "300"]
RUN = {"output_tok_s": 1234.5, "total_s": 6.7, "steps": 89, "share": 0.423}


def model_of(shape: str) -> ModelConfig:
    return ModelConfig.from_hf(SimpleNamespace(**SHAPES[shape]))


# -- shapes and workload -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "tiny"])
def test_a_shape_is_the_published_config(shape: str) -> None:
    name = f"{shape}-instruct" if shape.startswith("llama") else shape
    published = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    published |= {"eos_token_id": None}  # a shape has no end: it generates what it is asked for
    assert model_of(shape) == ModelConfig.from_hf(SimpleNamespace(**published))


def test_a_shape_is_read_like_a_model(tmp_path: Path) -> None:
    write_shape("tiny", tmp_path)
    info = load_model_info(str(tmp_path))
    assert info.config == model_of("tiny")
    assert info.dtype == torch.bfloat16
    assert info.config.vocab_size > max(max(job.prompt) for job in reference_workload(256))


def test_the_reference_workload_is_the_known_one() -> None:
    jobs = reference_workload()
    assert len(jobs) == 256
    assert sum(len(job.prompt) for job in jobs) == 142_827
    assert sum(job.output_len for job in jobs) == 133_966
    assert max(len(job.prompt) + job.output_len for job in jobs) <= 4096
    assert reference_workload(3) == jobs[:3]


# -- the limit -----------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "tok_s"), [("qwen3-0.6b", 35_200), ("qwen3-14b", 7_700)])
def test_the_limit_of_an_h200(shape: str, tok_s: float) -> None:
    """The figures were computed apart from this code, with a head's work for prompts too: 1 to 2%.

    A prompt needs logits of its last token only.
    """
    jobs = reference_workload()
    limit = reference.reference_limit(model_of(shape), jobs, H200, 2)
    assert 133_966 / limit.total_s == pytest.approx(tok_s, rel=0.02)
    assert 133_966 / limit.total_s > tok_s


def test_the_limit_step_by_step() -> None:
    """Weights and keys of each step counted one by one; in the second workload, arithmetic."""
    model = model_of("tiny")
    layer = 64 * 16 * (4 + 4 + 2 + 2) + 3 * 64 * 96
    weights, key_bytes = 2 * layer + 64 * 10_240, 2 * 2 * 2 * 16 * 2
    read = seen = 0
    for step in range(2, 7):
        live = [job for job in SMALL if job.output_len >= step]
        read += 2 * weights if live else 0
        seen += sum(len(job.prompt) + step - 1 for job in live)
    prompts = 47 * 4 * layer + 3 * 2 * 64 * 10_240
    prompts += sum(limits.attention_flops(model, 0, len(job.prompt)) for job in SMALL)
    limit = reference.reference_limit(model, SMALL, Ceilings(1e3, 1e12), 2)
    assert limit == pytest.approx((read / 1e3, seen * key_bytes / 1e3, prompts / 1e12))
    slow = reference.reference_limit(model, SMALL, Ceilings(1e12, 1e3), 2)
    assert slow.weights_s == pytest.approx((3 + 5) * 2 * weights / 1e3)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    model = model_of("qwen3-30b-a3b")
    one, many = limits.step_weights(model, 1), limits.step_weights(model, 10_000)
    assert 2 * one == pytest.approx(limits.token_flops(model) + limits.head_flops(model))
    experts = 48 * 3 * 2048 * 768
    assert many - one == pytest.approx((128 - 8) * experts)
    dense = model_of("qwen3-0.6b")
    assert limits.step_weights(dense, 1) == limits.step_weights(dense, 256)
    assert limits.read_share(dense, 1) == limits.read_share(model, 10_000) == 1
    assert limits.read_share(model, 1) == pytest.approx(one / many)


def test_a_copy_counts_both_ways() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < limits.copy_bandwidth(cpu, size_bytes=1 << 20, repeats=1) < 1e13


# -- random weights ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_fit_the_model(dtype: torch.dtype) -> None:
    set_rope_device("cpu")
    with torch.device("meta"), torch_dtype(dtype):
        model = create_model(model_of("tiny"))
    weights = dict(random_weights(model, torch.device("cpu")))
    again = dict(random_weights(model, torch.device("cpu")))
    other = dict(random_weights(model, torch.device("cpu"), seed=1))
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert not torch.equal(tensor, other[name])
            values = tensor.float()
            assert values.std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(values.mean().item()) < 0.001
    model.load_state_dict(weights)
    assert model.state_dict()["model.norm.weight"].dtype == dtype


def test_blocks_are_refused() -> None:
    model: Any = SimpleNamespace(state_dict=lambda: {"w.0": torch.empty(3, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=r"w\.0 is torch\.uint8.*--quantization none"):
        list(random_weights(model, torch.device("cpu")))


# -- the benchmark -------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short requests, on a machine of known ceilings."""
    monkeypatch.setattr(reference, "reference_workload", lambda count: SMALL[:count])
    monkeypatch.setattr(reference, "measure_ceilings", lambda *machine: Ceilings(1e9, 1e12))


def test_runs_stand_beside_the_limit(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "offline", "--shape", "tiny", "--requests", "2", *CPU]
    assert main([*command, "--log-level", "error", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["benchmark"], found["shape"], found["dtype"]) == ("shape", "tiny", "bfloat16")
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 7, 10)
    assert (found["copy_gb_per_s"], found["gemm_tflop_per_s"]) == (1.0, 1.0)
    limit = reference.reference_limit(model_of("tiny"), SMALL[:2], Ceilings(1e9, 1e12), 2)
    assert found["limit_tok_s"] == pytest.approx(10 / limit.total_s, rel=0.01)
    assert len(found["runs"]) == 2
    for run in found["runs"]:
        assert run["steps"] == 6  # prefill gives the first of six tokens
        assert run["share"] == pytest.approx(limit.total_s / run["total_s"], rel=0.05)


def test_all_steps_are_traced(short: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = ["bench", "offline", "--shape", "tiny", "--requests", "2", "--repeats", "1", *CPU]
    assert main([*command, "--log-level", "error", "--trace-file", str(path)]) == 0
    spans = [event for event in json.loads(path.read_text("utf-8")) if event["ph"] == "X"]
    assert len(spans) == 4 * 2 * 6  # each step has four; the warm-up runs the same requests
    steps = [span["args"] for span in spans if span["name"].startswith("step ")]
    assert sum(args["prefill_tokens"] for args in steps) == 2 * 7
    assert sum(args["decode_tokens"] for args in steps) == 2 * (3 + 5)


def test_a_trace_that_can_not_be_written_is_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["bench", "offline", "--model", "/no/such/model", "--trace-file", "/no/such/t.json"]
    assert main(command) == 2
    assert "--trace-file '/no/such/t.json' can't be written" in capsys.readouterr().err


def test_the_engine_is_configured_unless_the_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EngineConfig] = []

    def measure(
        shape: str, config: EngineConfig, jobs: list[Job], repeats: int, trace: None = None
    ) -> dict[str, Any]:
        given.append(config)
        speed = 90.0 if config.deterministic else 100.0
        return {"runs": [{**RUN, "output_tok_s": 1.0}, {**RUN, "output_tok_s": speed}]}

    monkeypatch.setattr(reference, "_measure", measure)
    plain = reference.bench_shape("tiny", EngineConfig(), num_requests=1, repeats=1)
    assert "deterministic_price" not in plain
    [config] = given
    assert (config.load_format, config.max_model_len) == ("dummy", 4096)
    assert (config.max_prefill_length, config.max_running_requests) == (16_384, 256)
    given.clear()
    asked = EngineConfig(max_running_requests=7, deterministic=True)
    found = reference.bench_shape("tiny", asked, num_requests=1, repeats=1)
    assert [config.deterministic for config in given] == [True, False]
    assert all(config.max_running_requests == 7 for config in given)
    assert found["deterministic_price"] == 0.1
    small = EngineConfig(max_prefill_length=100)
    reference.bench_shape("tiny", small, num_requests=1, repeats=1)
    assert (given[-1].max_prefill_length, given[-1].max_running_requests) == (100, 100)
    assert found["not_deterministic"][1]["output_tok_s"] == 100.0


def test_the_table_has_a_row_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    results = {
        "shape": "qwen3-0.6b", "dtype": "bfloat16", "device": "cuda", "machine": "NVIDIA H200",
        "deterministic": True, "requests": 256, "prompt_tokens": 142_827,
        "output_tokens": 133_966, "copy_gb_per_s": 4260.0, "gemm_tflop_per_s": 750.0,
        "limit_tok_s": 35_746.7, "runs": [RUN, RUN], "not_deterministic": [RUN],
        "limit_s": {"weights": 0.31, "kv_reads": 3.25, "prefill": 0.18},
        "deterministic_price": 0.125,
    }  # fmt: skip
    print_shape_table(results)
    said = capsys.readouterr().out
    for text in (
        "bfloat16 on cuda (NVIDIA H200), deterministic",
        "256 requests, 142,827 tokens in, 133,966 out",
        "copy 4,260.0 GB/s, read and write counted; GEMM 750.0 TFLOP/s",
        "limit 35,746.7 tok/s: 0.31 s weights, 3.25 s KV reads, 0.18 s prefill",
        "price of --deterministic: 12.5%",
    ):
        assert text in said
    assert said.count("1,234.5") == 3 and said.count("42.3%") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--shape", "huge"], "invalid choice: 'huge'"),
        (["--shape", "tiny", "--requests", "0"], "--requests = 0 must be 1 to 256"),
        (["--shape", "tiny", "--requests", "257"], "--requests = 257 must be 1 to 256"),
        (["--shape", "tiny", "--repeats", "0"], "--repeats = 0 must be at least 1"),
        (["--shape", "tiny", "--model", "smollm2"], "it takes no --model"),
        (["--shape", "tiny", "--workload", "batch"], "it takes no --workload"),
        (["--shape", "tiny", "--suite", "cpu"], "it takes no --suite"),
        (["--shape", "tiny", "--compare", "transformers"], "it takes no --compare"),
        (["--requests", "3"], "--requests is for --shape"),
        (
            ["--shape", "tiny", "--requests", "1", "--max-model-len", "8", *CPU],
            "sequences of 9 tokens; this engine runs up to 8 (--max-model-len)",
        ),
    ],
)
def test_what_is_refused(
    flags: list[str], said: str, short: None, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bench", "offline", *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
