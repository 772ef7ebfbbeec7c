"""Typed sockets between processes, and children that never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from minisgl.errors import ConfigError
from minisgl.message import Abort, Flush, ToScheduler
from minisgl.utils.mp import Child, Receiver, Sender, make_socket_folder, remove_folder
from tests.unit.mp_child import Said, Spec

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30
MODULE = "tests.unit.mp_child"


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def has_ended(pid: int) -> bool:
    """Also if whoever adopted it has not looked after it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def folder() -> Iterator[str]:
    folder = make_socket_folder()
    yield folder
    remove_folder(folder)


@pytest.fixture
def receiver(folder: str) -> Iterator[Receiver[Any]]:
    receiver: Receiver[Any] = Receiver(f"{folder}/here", ToScheduler)
    yield receiver
    receiver.close()


def send_bytes(folder: str, *payloads: bytes) -> None:
    """As another process of the same user could."""
    with zmq.Context.instance().socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{folder}/here")
        for payload in payloads:
            socket.send(payload)


# -- the folder ------------------------------------------------------------------------------


def test_nobody_else_may_enter_the_folder(folder: str) -> None:
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert os.listdir(folder) == []


def test_folder_is_removed_with_its_sockets_and_only_once(folder: str) -> None:
    receiver: Receiver[Any] = Receiver(f"{folder}/here", ToScheduler)
    assert os.listdir(folder) == ["here"]
    remove_folder(folder)
    assert not os.path.exists(folder)
    remove_folder(folder)
    receiver.close()


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        make_socket_folder()
    assert list(deep.iterdir()) == []


# -- messages --------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_as_their_types(folder: str, receiver: Receiver[Any]) -> None:
    sender: Sender[Any] = Sender(f"{folder}/here")
    sent: list[Any] = [Flush(1), Abort([2, 3], "stop"), Flush(4)]
    for message in sent:
        sender.send(message)
    sender.close()
    got: list[Any] = []
    while len(got) < len(sent):
        got += receiver.receive(wait=True)
    assert got == sent


def test_receiving_without_waiting_gives_what_is_there(receiver: Receiver[Any]) -> None:
    assert receiver.receive(wait=False) == []


def test_a_sender_may_come_before_the_receiver(folder: str) -> None:
    sender: Sender[Any] = Sender(f"{folder}/here")
    sender.send(Flush(1))
    receiver: Receiver[Any] = Receiver(f"{folder}/here", ToScheduler)
    assert receiver.receive(wait=True) == [Flush(1)]
    sender.close()
    receiver.close()


def test_many_threads_may_send_by_one_sender(folder: str, receiver: Receiver[Any]) -> None:
    sender: Sender[Any] = Sender(f"{folder}/here")
    threads = [
        threading.Thread(target=lambda k=k: [sender.send(Flush(k)) for _ in range(200)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[Any] = []
    while len(got) < 800:
        got += receiver.receive(wait=True)
    for thread in threads:
        thread.join()
    sender.close()
    assert [sum(message.ticket == k for message in got) for k in range(4)] == [200] * 4


def test_sending_after_the_end_is_no_error(folder: str, receiver: Receiver[Any]) -> None:
    sender: Sender[Any] = Sender(f"{folder}/here")
    sender.close()
    sender.send(Flush(1))
    sender.close()
    assert receiver.receive(wait=False) == []


class _NoMessage(msgspec.Struct, tag=True, array_like=True):
    ticket: int


GARBAGE = {
    "an empty one": b"",
    "no MessagePack": b"\xc1\xc1\xc1",
    "a pickle": b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.",
    "half a message": msgspec.msgpack.encode(Abort([1, 2, 3]))[:-1],
    "another type": msgspec.msgpack.encode(_NoMessage(1)),
    "a field of another type": msgspec.msgpack.encode(["Flush", "one"]),
    "no tag": msgspec.msgpack.encode({"ticket": 1}),
    "endless nesting": b"\x91" * 100_000,
    "a list that claims to be huge": b"\x92\xa5Abort\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_message_is_dropped_with_a_log_line(
    folder: str, receiver: Receiver[Any], caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    send_bytes(folder, garbage, msgspec.msgpack.encode(Flush(7)))
    got: list[Any] = []
    while not got:
        got += receiver.receive(wait=True)
    assert got == [Flush(7)]
    assert f"Dropped {len(garbage)} bytes that are no message" in caplog.text


def test_an_event_loop_can_wait_for_messages(folder: str, receiver: Receiver[Any]) -> None:
    async def main() -> list[Any]:
        got: list[Any] = []
        enough = asyncio.Event()

        def receive() -> None:
            got.extend(receiver.receive(wait=False))
            if len(got) == 500:
                enough.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(receiver.fileno(), receive)
        sender: Sender[Any] = Sender(f"{folder}/here")
        for ticket in range(500):
            sender.send(Flush(ticket))
            if ticket % 50 == 0:
                await asyncio.sleep(0.001)  # it comes in bursts, some while others are taken
        await asyncio.wait_for(enough.wait(), TIMEOUT_S)
        loop.remove_reader(receiver.fileno())
        sender.close()
        return got

    assert asyncio.run(main()) == [Flush(ticket) for ticket in range(500)]


# -- children --------------------------------------------------------------------------------


class Started:
    """A child, what it said of itself, and the exit code that its parent was told."""

    def __init__(self, folder: str, note: Path, **spec: Any) -> None:
        self.exits: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.folder = folder
        self.child = Child(
            MODULE, Spec(folder, str(note), **spec), lambda child, code: self.exits.put(code)
        )
        self._note = note

    def said(self) -> Said:
        assert wait_for(self._note.exists)
        return msgspec.json.decode(self._note.read_bytes(), type=Said)


@pytest.fixture
def started(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.chdir(tmp_path)
    started = Started(folder, tmp_path / "note", text='"ä\n')
    yield started
    started.child.stop(0)


def test_a_child_gets_its_arguments_and_knows_its_parent_alone(started: Started) -> None:
    said = started.said()
    assert said.spec == Spec(started.folder, said.spec.note, text='"ä\n')
    assert said.pid == started.child.pid
    assert Path(said.folder) == ROOT, "the user's folder would be searched for modules"
    assert said.session == said.pid, "Ctrl-C would reach it"


def test_a_child_ends_when_its_parent_stops_it(started: Started) -> None:
    started.said()
    started.child.stop(TIMEOUT_S)
    assert started.exits.get_nowait() == 0
    assert not psutil.pid_exists(started.child.pid), "it is a zombie, or lives"
    assert not os.path.exists(started.folder)
    started.child.stop()  # again


def test_a_child_that_does_not_end_is_killed(started: Started) -> None:
    started.said()
    os.kill(started.child.pid, signal.SIGSTOP)
    started.child.stop(0.1)
    assert started.exits.get_nowait() == -signal.SIGKILL
    assert not psutil.pid_exists(started.child.pid)


def test_a_child_leaves_signals_to_its_parent(folder: str, tmp_path: Path) -> None:
    signals = [int(signal.SIGTERM), int(signal.SIGINT)]
    started = Started(folder, tmp_path / "note", signals=signals, exit_code=7)
    assert started.said().spec.signals == signals
    assert started.exits.get(timeout=TIMEOUT_S) == 7
    started.child.stop()


def test_the_parent_is_told_of_a_child_that_was_killed(started: Started) -> None:
    started.said()
    os.kill(started.child.pid, signal.SIGKILL)
    assert started.exits.get(timeout=TIMEOUT_S) == -signal.SIGKILL
    started.child.stop()


def test_the_parent_is_told_of_a_child_that_ended(folder: str, tmp_path: Path) -> None:
    started = Started(folder, tmp_path / "note", exit_code=7)
    assert started.exits.get(timeout=TIMEOUT_S) == 7
    started.child.stop()


def test_the_parent_is_told_of_a_child_that_never_began(folder: str) -> None:
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    child = Child("tests.unit.no_such", Spec(folder, ""), lambda child, code: exits.put(code))
    assert exits.get(timeout=TIMEOUT_S) == 1
    child.stop()


def test_a_child_whose_parent_is_killed_ends_and_removes_the_sockets(tmp_path: Path) -> None:
    note = tmp_path / "note"
    parent = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(note)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        assert wait_for(note.exists)
    finally:
        parent.kill()
        parent.wait()
    said = msgspec.json.decode(note.read_bytes(), type=Said)
    assert wait_for(lambda: has_ended(said.pid))
    assert not os.path.exists(said.spec.folder)
