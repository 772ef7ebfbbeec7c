"""The output of a batch, which is also all that is known of earlier runs.

    a 200 | b 400 | c 200 | d 20        killed while it wrote d's line

    found:  a, c are done; b failed; the end is torn
    resume: a 200 | c 200 |             then b and d, and whatever else the input has, come again

Lines are appended. Only `resume` removes any, the failed ones, by writing the others to a second
file that then takes the first one's place, so that there is no moment at which results are lost.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import msgspec

from minisgl.errors import ConfigError

__all__ = ["OutputFile"]


class _Response(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    """What matters of a line."""

    custom_id: str | None
    response: _Response | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200


_decode = msgspec.json.Decoder(_Written).decode
_HEAD = b'{"id":"batch_req_'
"""How every line begins: a torn one is known by it."""


class OutputFile:
    """The file at `path`, made if there is none, and locked against a second batch.

    Raises `ConfigError` if it can't be written, or holds what no batch wrote: nothing of that is
    touched.
    """

    def __init__(self, path: str) -> None:
        self._name = path
        self._path = os.path.realpath(path)
        self.done: set[str] = set()
        """`custom_id`s that succeeded in earlier runs."""
        self._num_failed = 0
        self._end = 0
        """Bytes of the file up to its last whole line."""
        self._locked: list[BinaryIO] = []
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise ConfigError(
                f"--output {path} is no regular file, and a batch resumes from it: name another"
            )
        try:
            self._file = self._open(self._path)
            self._survey()
        except OSError as error:
            self.close()
            raise ConfigError(f"--output {path}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise

    def resume(self) -> None:
        """Make room for new lines: remove a torn one, and the failed ones, which come again."""
        if self._num_failed == 0:
            self._file.truncate(self._end)
            return
        beside = self._path + ".tmp"
        rewritten = self._open(beside)
        rewritten.truncate(0)
        for line in self._lines():
            if line.endswith(b"\n") and _decode(line).succeeded:
                _write_all(rewritten, line)
        shutil.copymode(self._path, beside)
        os.fsync(rewritten.fileno())
        os.replace(beside, self._path)
        self._file = rewritten

    def write(self, line: bytes) -> None:
        """Append a line; it is with the operating system when this returns."""
        _write_all(self._file, line)

    def close(self) -> None:
        """Close and unlock it."""
        for file in self._locked:
            file.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, path: str) -> BinaryIO:
        """Open a file to append to, and lock it until the end: also one that was replaced, for
        another process may have opened it before."""
        file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._locked.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output {self._name}: another batch is writing to it") from None
        return file

    def _survey(self) -> None:
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n") and _HEAD.startswith(line[: len(_HEAD)]):
                return  # torn, or as good as: it comes again
            try:
                written = _decode(line)
            except msgspec.DecodeError:
                raise ConfigError(
                    f"--output {self._name}: its line {number} is no line of a batch's output; "
                    "name another file, or remove this one"
                ) from None
            if not line.endswith(b"\n"):
                return
            self._end += len(line)
            if written.succeeded and written.custom_id is not None:
                self.done.add(written.custom_id)
            else:
                self._num_failed += 1

    def _lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # without a buffer, a write may take a part
        rest = rest[file.write(rest) :]
