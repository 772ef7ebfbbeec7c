"""`resolve`, the pool's size, and what the process may use: pure functions and their errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl.config import DTYPES, EngineConfig, ModelFacts, split_address
from minisgl.engine import memory
from minisgl.engine.memory import plan_pool
from minisgl.errors import ConfigError
from minisgl.kvcache import KVShape
from minisgl.resolve import resolve
from minisgl.utils import torch_utils
from minisgl.utils.hardware import Hardware, available_cpus, available_memory_bytes

CPU = Hardware(num_cpus=4, available_bytes=8 << 30, has_cuda=False)
GPU = replace(CPU, has_cuda=True)
MODEL = ModelFacts(torch.bfloat16, max_context=4096)
TWO_NODES = {"tp": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:29500"}
SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, page_size=16)


def test_defaults_depend_on_the_device_and_say_why():
    cpu, gpu = resolve(EngineConfig(), CPU, MODEL), resolve(EngineConfig(), GPU, MODEL)
    assert (cpu.device.type, gpu.device.type) == ("cpu", "cuda")
    assert (cpu.max_running_requests, gpu.max_running_requests) == (64, 256)
    assert (cpu.dtype, cpu.max_model_len, cpu.threads) == (torch.bfloat16, 4096, 4)
    assert (cpu.overlap, gpu.overlap) == (False, True)
    assert any("max_model_len = 4096: the model's context" in reason for reason in cpu.reasons)


def test_what_the_user_says_stands_and_needs_no_reason():
    config = EngineConfig(dtype="float32", max_model_len=100, threads=1, device="cpu")
    resolved = resolve(config, GPU, MODEL)
    assert (resolved.dtype, resolved.max_model_len, resolved.threads) == (torch.float32, 100, 1)
    assert resolved.max_model_len_asked
    assert not any("max_model_len" in reason for reason in resolved.reasons)


def test_rows_and_budget_fit_each_other():
    assert resolve(EngineConfig(max_prefill_length=16), CPU, MODEL).max_running_requests == 16
    assert resolve(EngineConfig(max_running_requests=5000), CPU, MODEL).max_prefill_length == 5000
    with pytest.raises(ConfigError, match="--max-running-requests 17 .* --max-prefill-length 16"):
        resolve(EngineConfig(max_running_requests=17, max_prefill_length=16), CPU, MODEL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "--page-size = 0"),
        ({"page_size": True}, "--page-size = True"),
        ({"memory_ratio": 1.5}, "--memory-ratio = 1.5"),
        ({"dtype": "int3"}, "--dtype = 'int3': choose from auto, float32"),
        ({"tp": 0}, "--tp = 0"),
        ({"cache": "lru"}, "--cache = 'lru': choose from radix, naive"),
        ({"schedule_policy": "sjf"}, "--schedule-policy = 'sjf': choose from fcfs, lpm"),
        ({"overlap": True}, "--overlap = True: choose from auto, on, off"),
        ({"cache": "naive", "schedule_policy": "lpm"}, "--cache naive has none"),
        ({"nnodes": 0}, "--nnodes = 0 must"),
        ({**TWO_NODES, "node_rank": 2}, "--node-rank = 2 must .* less than --nnodes 2"),
        ({**TWO_NODES, "node_rank": -1}, "--node-rank = -1 must"),
        ({**TWO_NODES, "node_rank": True}, "--node-rank = True must"),
        ({"node_rank": 1}, "--node-rank = 1 must .* less than --nnodes 1"),
        ({**TWO_NODES, "tp": 3}, "--tp 3 must divide by --nnodes 2"),
        ({"nnodes": 2}, "--tp 1 must divide by --nnodes 2"),
        ({"tp": 2, "nnodes": 2}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ({"tp": 2, "dist_init_addr": "a:1"}, "--dist-init-addr a:1 .* --nnodes is 1: raise"),
        ({**TWO_NODES, "dist_init_addr": 29500}, "--dist-init-addr = 29500 must be a text"),
        *(
            ({**TWO_NODES, "dist_init_addr": bad}, "must be HOST:PORT with a port of 1 to 65535")
            for bad in (
                "",
                "host",
                "host:",
                ":1",
                "host:0",
                "host:65536",
                "host:1x",
                "::1:5",
                "[]:5",
            )
        ),
    ],
)
def test_bad_values_name_flag_and_value(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_addresses_have_a_host_and_a_port():
    assert split_address("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert split_address("node-0.example:1") == ("node-0.example", 1)
    assert split_address("[fd00::1]:65535") == ("fd00::1", 65535)


def test_ranks_of_a_node_share_its_cpus():
    heads = replace(MODEL, num_qo_heads=8, num_kv_heads=8)
    for options, threads in (
        ({"tp": 2}, 2),
        (TWO_NODES, 4),
        ({**TWO_NODES, "tp": 4, "node_rank": 1}, 2),
        ({**TWO_NODES, "tp": 8}, 1),
    ):
        config = resolve(EngineConfig(device="cpu", **options), CPU, heads)
        assert (config.threads, config.tp) == (threads, options["tp"])
        assert config.nnodes == options.get("nnodes", 1)


def test_what_the_machine_or_model_lacks_is_refused():
    with pytest.raises(ConfigError, match="--device cuda"):
        resolve(EngineConfig(device="cuda"), CPU, MODEL)
    with pytest.raises(ConfigError, match="float16"):
        resolve(EngineConfig(dtype="float16"), CPU, MODEL)
    with pytest.raises(ConfigError, match="5000: the model's context is 4096"):
        resolve(EngineConfig(max_model_len=5000), CPU, MODEL)
    dynamic = replace(MODEL, rope_type="dynamic")
    with pytest.raises(ConfigError, match="dynamic NTK angles depend on what else"):
        resolve(EngineConfig(max_model_len=5000), CPU, dynamic)


def plan(monkeypatch, available: int, **options):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: available)
    config = resolve(EngineConfig(**options), CPU, MODEL)
    return plan_pool(config, SHAPE, lambda: 0)


def test_pool_takes_its_share_but_no_more_than_is_useful(monkeypatch):
    page = SHAPE.page_bytes(torch.bfloat16)
    assert page == 2 * 2 * 16 * 2 * 8 * 2
    assert plan(monkeypatch, 10 * 300 * page).num_pages == 900  # 0.3 of it
    assert plan(monkeypatch, 1000 * 300 * page).num_pages == 90_000  # the rest is for prefixes
    assert plan(monkeypatch, 1000 * 300 * page, cache="naive").num_pages == 64 * 4096 // 16


def test_a_pool_too_small_shortens_the_model_s_length_but_not_the_user_s(monkeypatch):
    page = SHAPE.page_bytes(torch.bfloat16)
    assert plan(monkeypatch, 100 * page).max_model_len == 30 * 16
    message = r"30 pages of 16 tokens .* 480 tokens; one request of --max-model-len 1000 needs 63"
    with pytest.raises(ConfigError, match=message):
        plan(monkeypatch, 100 * page, max_model_len=1000)
    with pytest.raises(ConfigError, match="0 pages"):
        plan(monkeypatch, 0)


def test_cgroup_limits_count(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    every = available_cpus(tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert available_cpus(tmp_path) == min(every, 2)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cpus(tmp_path) == every
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_memory_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1 << 20
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert available_cpus(tmp_path) == 3


def test_cgroup_v1_files_are_read_too(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus(tmp_path) == 1
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("4096\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("96\n")
    assert available_memory_bytes(tmp_path) == 4000


def test_the_dtypes_of_the_flag_are_those_that_torch_utils_knows() -> None:
    assert tuple(torch_utils.DTYPES) == DTYPES
