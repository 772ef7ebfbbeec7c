"""Which all-reduces go through peers' memory, and from which sizes on the group's are faster."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed import DistributedCommunicator, DistributedInfo, impl
from minisgl.distributed.peers import PeerMemory, Timing, faster_up_to


class FakePeers(PeerMemory):
    """Without a GPU: says what it would be given."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.taken: list[int] = []
        self.is_closed = False

    def all_reduce(self, x: torch.Tensor) -> None:
        self.taken.append(x.nbytes)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def by_group(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of what the group reduced; this process is one of two ranks."""
    found: list[int] = []
    monkeypatch.setattr("minisgl.distributed.info._info", DistributedInfo(0, 2))
    monkeypatch.setattr(impl, "_require_group", lambda: None)
    monkeypatch.setattr(impl, "_peers", None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: found.append(x.nbytes))
    return found


def test_small_tensors_go_through_peers(by_group: list[int]) -> None:
    comm, peers = DistributedCommunicator(), FakePeers(1024)
    impl.use_peers(peers)
    for size in (256, 260):
        comm.all_reduce(torch.zeros(size))
    comm.all_reduce(torch.zeros(8, 8).T)  # not contiguous
    comm.all_reduce(torch.zeros(64, dtype=torch.float16))  # a type that the kernel doesn't add
    comm.all_reduce(torch.zeros(3))  # not a multiple of 16 bytes
    comm.all_reduce(torch.zeros(9)[1:])  # does not begin at one
    comm.all_reduce(torch.zeros(64, dtype=torch.bfloat16))
    assert peers.taken == [1024, 128]
    assert by_group == [1040, 256, 128, 12, 32]
    impl.use_peers(None)
    assert peers.is_closed
    comm.all_reduce(torch.zeros(4))
    assert by_group[-1] == 16


@pytest.mark.parametrize(
    ("faster", "limit"),
    [([True, True, False, True], 8192), ([False, True], 0), ([True, True], 8192), ([], 0)],
)
def test_peers_take_what_they_are_faster_for(faster: list[bool], limit: int) -> None:
    timings = [Timing(4096 << i, 1e-6 if fast else 3e-6, 2e-6) for i, fast in enumerate(faster)]
    assert faster_up_to(timings) == limit
