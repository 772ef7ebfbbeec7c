"""Ranks on several nodes, which are processes of one host here (CPU, gloo, float32).

Node 0 is an `LLM` in this process where nothing else is said.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig, split_address
from minisgl.distributed import make_store
from minisgl.errors import ConfigError, ModelNotFoundError
from minisgl.scheduler import nodes, other_node, ranks
from minisgl.scheduler.other_node import run_node
from tests.helpers import TINY, random_prompts, save, tiny_hf_model
from tests.nodes import FOLLOWER, ROOT, SOON_S, all_gone, failing, flags, free_address, node

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kernels": "reference",
    "threads": 1,
    "num_pages": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = random_prompts([5, 40, 17], TINY["vocab_size"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tiny_hf_model("llama"), tmp_path_factory.mktemp("llama")))


@pytest.fixture
def address() -> str:
    return free_address()


def answers(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def lead(model: Path, address: str, tp: int = 2) -> LLM:
    """Node 0 of two."""
    return LLM(model, tp=tp, nnodes=2, dist_init_addr=address, **OPTIONS)


def test_nodes_give_what_one_process_gives_and_their_address_is_free_again(
    model: Path, address: str
) -> None:
    with LLM(model, **OPTIONS) as llm:
        expected = answers(llm)
    for tp, where in ((2, "ranks 1 (of 2)"), (4, "ranks 2, 3 (of 4)")):
        # What is local may differ: it has one name more, and computes with more threads.
        theirs = {**OPTIONS, "tp": tp, "threads": 2, "memory_ratio": 0.2}
        with node(model, address.replace("127.0.0.1", "localhost"), flags(theirs)) as other:
            with lead(model, address, tp) as llm:
                assert answers(llm) == expected
                assert len(other.ranks()) == tp // 2
            assert other.ended() == 0
            assert f"node 1 of 2 holds {where}; it serves no HTTP" in other.log
            assert "Traceback" not in other.log and "WARNING" not in other.log


def test_a_killed_rank_of_another_node_ends_all(model: Path, address: str) -> None:
    with node(model, address, flags({**OPTIONS, "tp": 4})) as other, lead(model, address, 4) as llm:
        own = psutil.Process().children(recursive=True)
        stream = llm.stream(PROMPTS[0], ENDLESS)
        next(stream)
        theirs = other.ranks()
        theirs[1].kill()
        why = f"rank 3 (pid {theirs[1].pid} on node 1) was killed by SIGKILL"
        assert why in failing(lambda: list(stream))
        assert other.ended() == 1
        assert f"minisgl serve: error: tensor-parallel {why}" in other.log
        assert why in failing(lambda: answers(llm)), "it stays so"
        llm.close()
        assert all_gone([*own, *theirs])


def test_a_killed_rank_of_node_0_ends_all_although_nothing_runs(model: Path, address: str) -> None:
    with node(model, address, flags({**OPTIONS, "tp": 4})) as other, lead(model, address, 4) as llm:
        theirs = other.ranks()
        [own] = psutil.Process().children()[-1:]
        assert FOLLOWER in own.cmdline()
        own.kill()
        why = f"tensor-parallel rank 1 (pid {own.pid} on node 0) was killed by SIGKILL"
        assert other.ended() == 1
        assert f"minisgl serve: error: {why}" in other.log
        assert all_gone(theirs)
        assert why in failing(lambda: answers(llm))


def test_a_killed_node_is_missed(
    model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not taken for what broke when it went: other ranks' connections."""
    monkeypatch.setattr(nodes, "SILENCE_S", 2.5)
    with node(model, address, flags({**OPTIONS, "tp": 4})) as other, lead(model, address, 4) as llm:
        stream = llm.stream(PROMPTS[0], ENDLESS)
        next(stream)
        theirs = other.ranks()
        other.process.kill()
        why = failing(lambda: list(stream))
        assert why.startswith("node 1 has been silent for 2.5 s: it was killed, hangs, or")
        assert all_gone(theirs)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_ends_with_node_0(model: Path, address: str, number: int) -> None:
    options = {**OPTIONS, "tp": 2, "nnodes": 2, "dist_init_addr": address}
    code = f"from minisgl import LLM; llm = LLM({str(model)!r}, **{options!r}); print(1); input()"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with (
        node(model, address, flags({**OPTIONS, "tp": 2})) as other,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as program,
    ):
        assert program.stdout is not None and program.stdout.readline() == b"1\n"
        theirs = other.ranks()
        program.send_signal(number)
        try:
            assert other.ended() == 1
        finally:
            program.kill()
        gone = "is gone" if number == signal.SIGKILL else "has not answered for 5 s"
        assert f"minisgl serve: error: node 0 {gone}" in other.log
        assert all_gone(theirs)


def test_a_node_that_is_told_to_end(
    model: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with node(model, address, flags({**OPTIONS, "tp": 2})) as other, lead(model, address) as llm:
        start = time.monotonic()
        other.process.terminate()
        assert other.ended() == 1
        why = "node 1 was ended by SIGTERM"
        assert f"error: {why}" in other.log
        while why not in caplog.text:  # although nothing runs
            assert time.monotonic() - start < SOON_S
            time.sleep(0.02)
        assert why in failing(lambda: answers(llm))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"page_size": 8}, "can't join: --page-size is 16 on node 0 and 8 on node 1; give all"),
        ({"model": "nowhere"}, "did not start: ModelNotFoundError"),
    ],
)
def test_a_node_that_can_not_join(
    model: Path, address: str, change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / change["model"] if "model" in change else model
    options = {**OPTIONS, "tp": 2, **change}
    options.pop("model", None)
    with node(path, address, flags(options)) as other:
        assert f"node 1 {why}" in failing(lambda: lead(model, address))
        assert other.ended() == 1
        assert f"minisgl serve: error: node 1 {why}" in other.log


def test_node_0_that_can_not_start_says_so(model: Path, address: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with node(model, address, flags({**OPTIONS, "tp": 2})) as other:
        with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
            lead(tmp_path, address)
        assert other.ended() == 1
        assert "error: node 0 did not start: ModelNotFoundError" in other.log


# -- what needs no second node ----------------------------------------------------------------


def other(address: str) -> EngineConfig:
    return EngineConfig(tp=2, nnodes=2, node_rank=1, dist_init_addr=address, **OPTIONS)


def test_only_node_0_answers(model: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="run `minisgl serve ... --node-rank 1` here"):
        LLM(model, **vars(other(address)))


def test_nodes_are_not_waited_for_without_end(
    model: Path, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (ranks, other_node):
        monkeypatch.setattr(module, "JOIN_S", 0.4)
        monkeypatch.setattr(module, "LOG_S", 0.1)
    with pytest.raises(ConfigError, match=f"nodes 1 did not come to {address} in 0.4 s; run"):
        lead(model, address)
    assert "rank 0 has waited 0 s for node 1" in caplog.text
    monkeypatch.setattr(other_node, "POLL_S", 0.05)
    with pytest.raises(ConfigError, match=f"{address}: node 0 was not there in 0.4 s"):
        run_node(str(model), other(address))
    assert f"node 0 is not at {address} yet" in caplog.text


def test_an_address_that_others_use(
    model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_node, "SILENCE_S", 0.3)
    with socket.create_server(split_address(address)):
        with pytest.raises(ConfigError, match=r"port \d+: it is in use; end what has it, or"):
            lead(model, address)
        with pytest.raises(ConfigError, match=f"{address}: what listens there is no node 0"):
            run_node(str(model), other(address))


def test_each_node_has_its_own_rank(model: Path, address: str) -> None:
    store = make_store(2, split_address(address)[1])
    store.set("facts", "{}")
    store.add("node 1", 1)
    with pytest.raises(ConfigError, match="--node-rank 1: a node of this rank has come"):
        run_node(str(model), other(address))


@pytest.mark.parametrize(
    ("address", "name", "interface", "is_said"),
    [
        ("10.0.0.1:500", "localhost", "", True),
        ("10.0.0.1:500", "localhost", "eth0", False),
        ("10.0.0.1:500", "10.0.0.2", "", False),
        ("127.0.0.1:500", "localhost", "", False),
    ],
)
def test_a_host_name_that_others_do_not_reach(
    address: str,
    name: str,
    interface: str,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    nodes.warn_of_loopback(address)
    assert ("set GLOO_SOCKET_IFNAME to the interface" in caplog.text) is is_said


def test_differences_name_the_cause_first() -> None:
    one = {"flags": {"--tp": "2", "--ep": "False"}, "choices": {"the choice of device": "cpu"}}
    two = {"flags": {"--tp": "2", "--ep": "True"}, "choices": {"the choice of device": "cuda"}}
    assert nodes.differences(one, one, 3) == ""
    assert nodes.differences(one, two, 3) == "--ep is False on node 0 and True on node 3"
    three = {**one, "choices": two["choices"]}
    on_two = "the choice of device is cpu on node 0 and {} on node 1"
    assert nodes.differences(one, three, 1) == on_two.format("cuda")
    assert nodes.differences(one, {"flags": one["flags"]}, 1) == on_two.format("None")


def test_the_port_is_given_back_after_a_failed_start(
    model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "JOIN_S", 0.0)
    with pytest.raises(ConfigError, match="did not come"):
        lead(model, address)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(split_address(address))
        sock.listen()
