"""The header of a GGUF file: metadata and where each tensor lies, every length checked first.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count    x { key: string | type u32 | value }          -> `GGUFHeader.metadata`
    tensor count x { name: string | dims u32 | dim u64 ... | type u32 | offset u64 }
    padding to `general.alignment`                             <- `GGUFHeader.data_offset`
    tensor data

All numbers are little endian, and a string is its length (u64) then UTF-8 bytes. The file may
come from anywhere, so no number in it is believed: each count, length and offset is compared
with the bytes that are really there before anything is read or allocated for it, hence the work
and memory are bounded by the file's size. Sums are Python integers, which can't wrap around.

Source of the layout: the format's specification, ggml `docs/gguf.md`.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

__all__ = ["GGML_TYPES", "GGMLType", "GGUFHeader", "GGUFTensorInfo", "read_gguf_header"]


class GGMLType(NamedTuple):
    """A storage type: every `block` consecutive elements of a row take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
# Format characters of `struct`, by the format's number of each scalar type.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
# The fewest bytes a key (empty name, type, one byte) and a tensor entry (one dim) can take.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class GGUFTensorInfo(NamedTuple):
    """One tensor: `shape` in PyTorch's order (rows first), bytes `offset .. offset + nbytes`.

    `offset` counts from the start of the file; `type` is a key of `GGML_TYPES`.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type].name


@dataclass(frozen=True)
class GGUFHeader:
    """What stands before the tensor data. Cached and shared: treat it as read-only.

    `metadata` holds ints, floats, bools, strings and lists of them; without the tokenizer, its
    arrays (keys `tokenizer.*`) are left out. `array_lengths` has the length of every array,
    left out or not.
    """

    path: str
    version: int
    metadata: dict[str, Any]
    array_lengths: dict[str, int]
    tensors: list[GGUFTensorInfo]
    data_offset: int
    file_bytes: int


def read_gguf_header(path: str, *, with_tokenizer: bool = False) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`.

    `with_tokenizer=False` steps over the arrays under `tokenizer.` (hundreds of thousands of
    strings) without building them. The result is cached until the file's size or time changes.

    Raises ModelNotFoundError if there is no such file; CheckpointError if it isn't GGUF, is
    damaged or cut short (naming the item and its bytes); UnsupportedModelError for a version or
    a tensor type that is not known.
    """
    real = os.path.realpath(path)
    if not os.path.isfile(real):
        raise ModelNotFoundError(f"No GGUF file at {path!r}: give the path of a .gguf file")
    try:
        stat = os.stat(real)
        return _read_cached(real, stat.st_mtime_ns, stat.st_size, with_tokenizer)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


@functools.lru_cache(maxsize=4)
def _read_cached(path: str, mtime_ns: int, file_bytes: int, with_tokenizer: bool) -> GGUFHeader:
    """`read_gguf_header` for one state of one file: `mtime_ns` is only part of the cache's key."""
    if file_bytes == 0:  # an empty file can't be mapped
        raise CheckpointError(f"{path} is truncated: the file is empty; fetch it again")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        return _parse(_Cursor(path, buffer), with_tokenizer)


class _Cursor:
    """A position in the file. Invariant: `pos <= size`, and no read goes beyond `size`."""

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a valid GGUF file: {message}")

    def truncated(self, what: str, start: int, stop: int) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is truncated: {what} needs bytes {start}..{stop}, "
            f"the file has {self.size}; fetch it again"
        )

    def take(self, nbytes: int, what: str) -> int:
        """Step over `nbytes` bytes and return where they begin."""
        start, stop = self.pos, self.pos + nbytes
        if stop > self.size:
            self.truncated(what, start, stop)
        self.pos = stop
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def count(self, what: str, unit_bytes: int) -> int:
        """A number of items, each of at least `unit_bytes` bytes, that all come later."""
        count = self.u64(what)
        if count * unit_bytes > self.size - self.pos:
            self.truncated(f"{what} = {count}", self.pos, self.pos + count * unit_bytes)
        return count

    def text(self, start: int, stop: int, what: str) -> str:
        try:
            return str(self.buffer[start:stop], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        return self.text(start, self.pos, what)

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown value type {kind}")
        unpacker = struct.Struct("<" + _SCALARS[kind])
        return unpacker.unpack_from(self.buffer, self.take(unpacker.size, what))[0]

    def array(self, what: str, keep: bool, depth: int = 1) -> tuple[int, list[Any]]:
        """An array's length, and its items (an empty list unless `keep`)."""
        kind = self.u32(what)
        if kind == _STRING:
            count = self.count(what, 8)
            return count, self.strings(count, what, keep)
        if kind == _ARRAY:
            if depth == _MAX_ARRAY_DEPTH:
                self.fail(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
            count = self.count(what, 12)
            items = [self.array(what, keep, depth + 1)[1] for _ in range(count)]
            return count, items if keep else []
        if kind not in _SCALARS:
            self.fail(f"{what} has items of the unknown value type {kind}")
        unit = struct.calcsize("<" + _SCALARS[kind])
        count = self.count(what, unit)
        start = self.take(count * unit, what)
        if not keep:
            return count, []
        return count, list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.buffer, start))

    def strings(self, count: int, what: str, keep: bool) -> list[str]:
        """`count` strings: the vocabulary's loop, so it works on locals and not by `string`."""
        buffer, size, pos, unpack = self.buffer, self.size, self.pos, _U64.unpack_from
        items: list[str] = []
        for index in range(count):
            if pos + 8 > size:
                self.truncated(f"item {index} of {what}", pos, pos + 8)
            start = pos + 8
            pos = start + unpack(buffer, pos)[0]
            if pos > size:
                self.truncated(f"item {index} of {what}", start, pos)
            if keep:
                try:
                    items.append(buffer[start:pos].decode())
                except UnicodeDecodeError:
                    self.text(start, pos, what)  # raises, and says where
        self.pos = pos
        return items


def _parse(cursor: _Cursor, with_tokenizer: bool) -> GGUFHeader:
    version = _check_version(cursor)
    num_tensors = cursor.count("the tensor count", _MIN_TENSOR_BYTES)
    num_keys = cursor.count("the key count", _MIN_KEY_BYTES)
    metadata: dict[str, Any] = {}
    array_lengths: dict[str, int] = {}
    seen: set[str] = set()
    for index in range(num_keys):
        key = cursor.string(f"the name of key {index}")
        if key in seen:
            cursor.fail(f"the key {key!r} occurs twice")
        seen.add(key)
        kind = cursor.u32(f"the type of key {key!r}")
        if kind != _ARRAY:
            metadata[key] = cursor.value(kind, f"key {key!r}")
            continue
        keep = with_tokenizer or not key.startswith("tokenizer.")
        array_lengths[key], items = cursor.array(f"key {key!r}", keep)
        if keep:
            metadata[key] = items
    entries = [_tensor_entry(cursor, index) for index in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment = {alignment!r} is not a power of two from 8 up")
    data_offset = -(-cursor.pos // alignment) * alignment
    tensors = [_place(cursor, entry, data_offset, alignment) for entry in entries]
    if len({info.name for info in tensors}) < len(tensors):
        cursor.fail("two tensors have the same name")
    return GGUFHeader(
        path=cursor.path,
        version=version,
        metadata=metadata,
        array_lengths=array_lengths,
        tensors=tensors,
        data_offset=data_offset,
        file_bytes=cursor.size,
    )


def _check_version(cursor: _Cursor) -> int:
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        cursor.fail(f"it begins with {magic!r}, not b'GGUF'")
    cursor.pos = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        why = "big-endian files are" if version in (2 << 24, 3 << 24) else f"version {version} is"
        raise UnsupportedModelError(
            f"{cursor.path}: GGUF {why} not supported; convert it to version 3, little endian"
        )
    return version


def _tensor_entry(cursor: _Cursor, index: int) -> GGUFTensorInfo:
    """A tensor's entry as stored: its offset is still relative to the data, its size unchecked."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"the entry of tensor {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MAX_DIMS}")
    # The file lists the fastest-running dimension first, PyTorch last.
    shape = tuple(cursor.u64(what) for _ in range(num_dims))[::-1]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if kind not in GGML_TYPES:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {name!r} has the unknown type number {kind}; "
            "use a file quantized to Q8_0, Q4_K or another common type"
        )
    form = GGML_TYPES[kind]
    if min(shape) < 1 or shape[-1] % form.block:
        cursor.fail(
            f"tensor {name!r} has the shape {shape}, whose rows must be a positive multiple "
            f"of {form.block} ({form.name})"
        )
    return GGUFTensorInfo(
        name, shape, kind, offset, math.prod(shape) // form.block * form.block_bytes
    )


def _place(
    cursor: _Cursor, entry: GGUFTensorInfo, data_offset: int, alignment: int
) -> GGUFTensorInfo:
    """The entry with its offset counted from the file's start, if its bytes are all there."""
    if entry.offset % alignment:
        cursor.fail(f"tensor {entry.name!r}: offset {entry.offset} is not aligned to {alignment}")
    start = data_offset + entry.offset
    if start + entry.nbytes > cursor.size:
        cursor.truncated(f"tensor {entry.name!r}", start, start + entry.nbytes)
    return entry._replace(offset=start)
