"""Headers of GGUF files: what gguf writes is read, a hostile or damaged one is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from minisgl.errors import (
    CheckpointError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from minisgl.models.gguf import iter_gguf_tensors, load_gguf_config
from minisgl.utils.gguf_header import GGML_TYPES, read_gguf_header
from tests.unit.gguf_files import VOCAB, Written


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header_bytes(
    keys: bytes = b"",
    tensors: bytes = b"",
    counts: tuple[int, int] = (0, 0),
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    return magic + struct.pack("<IQQ", version, *counts) + keys + tensors


def tensor_entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


U64_MAX = 2**64 - 1
ALIGN = text("general.alignment") + struct.pack("<I", 4)
BAD_HEADERS = {
    "empty": (b"", "is truncated: the file is empty"),
    "magic": (header_bytes(magic=b"GGML"), "begins with b'GGML'"),
    "short": (b"GGUF\x03\x00", r"truncated: the version needs bytes 4..8, the file has 6"),
    "tensor count": (header_bytes(counts=(U64_MAX, 0)), "the tensor count = 18446744073709551615"),
    "key count": (header_bytes(counts=(0, 2**40)), "the key count = 1099511627776"),
    "key name": (
        header_bytes(struct.pack("<Q", 2**62) + bytes(99), counts=(0, 1)),
        "the name of key 0 needs bytes 32..4611686018427387936",
    ),
    "string": (
        header_bytes(text("k") + struct.pack("<IQ", 8, U64_MAX) + bytes(9), counts=(0, 1)),
        "truncated: key 'k' needs bytes",
    ),
    "array": (
        header_bytes(text("k") + struct.pack("<IIQ", 9, 6, 2**61) + bytes(9), counts=(0, 1)),
        "truncated: key 'k' = 2305843009213693952",
    ),
    "array of strings": (
        header_bytes(text("tokenizer.k") + struct.pack("<IIQQ", 9, 8, 1, U64_MAX), counts=(0, 1)),
        "item 0 of key 'tokenizer.k'",
    ),
    "nesting": (
        header_bytes(
            text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, counts=(0, 1)
        ),
        "nests arrays",
    ),
    "value type": (header_bytes(text("k") + struct.pack("<IQ", 77, 0), counts=(0, 1)), "type 77"),
    "not UTF-8": (
        header_bytes(struct.pack("<Q", 1) + b"\xff" + struct.pack("<IQ", 4, 0), counts=(0, 1)),
        "not UTF-8",
    ),
    "key twice": (
        header_bytes((text("k") + struct.pack("<II", 4, 0)) * 2, counts=(0, 2)),
        "'k' occurs twice",
    ),
    "alignment": (header_bytes(ALIGN + struct.pack("<I", 24), counts=(0, 1)), "alignment = 24"),
    "alignment 0": (header_bytes(ALIGN + struct.pack("<I", 0), counts=(0, 1)), "alignment = 0"),
    "dimensions": (
        header_bytes(tensors=tensor_entry("x", (1,) * 9), counts=(1, 0)),
        "'x' has 9 dimensions",
    ),
    "no elements": (
        header_bytes(tensors=tensor_entry("x", (0, 5)) + bytes(99), counts=(1, 0)),
        "multiple of 1",
    ),
    "part of a block": (
        header_bytes(tensors=tensor_entry("x", (33, 5), kind=8) + bytes(999), counts=(1, 0)),
        r"multiple of 32 \(Q8_0\)",
    ),
    "product overflow": (
        # In 64 bits the product of these would wrap to 0 elements.
        header_bytes(tensors=tensor_entry("x", (2**32, 2**32)) + bytes(99), counts=(1, 0)),
        "tensor 'x' needs bytes",
    ),
    "offset overflow": (
        header_bytes(tensors=tensor_entry("x", (4,), offset=2**64 - 32) + bytes(99), counts=(1, 0)),
        "tensor 'x' needs bytes 18446744073709551648..18446744073709551664, the file has",
    ),
    "unaligned": (
        header_bytes(tensors=tensor_entry("x", (4,), offset=3) + bytes(99), counts=(1, 0)),
        "offset 3 is not aligned to 32",
    ),
    "name twice": (
        header_bytes(tensors=tensor_entry("x", (4,)) * 2 + bytes(99), counts=(2, 0)),
        "two tensors have the same name",
    ),
}


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_a_checkpoint_error(tmp_path: Path, name: str, with_tokenizer: bool) -> None:
    content, message = BAD_HEADERS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(str(path), with_tokenizer=with_tokenizer)
    assert str(path) in str(caught.value)


def test_unsupported_versions_and_types(tmp_path: Path) -> None:
    for version, message in ((1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")):
        path = tmp_path / f"{version}.gguf"
        path.write_bytes(header_bytes(version=version))
        with pytest.raises(UnsupportedModelError, match=message):
            read_gguf_header(str(path))
    path = tmp_path / "type.gguf"
    path.write_bytes(header_bytes(tensors=tensor_entry("x", (4,), kind=4), counts=(1, 0)))
    with pytest.raises(UnsupportedModelError, match="tensor 'x' has the unknown type number 4"):
        read_gguf_header(str(path))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="No GGUF file at"):
            load_gguf_config(str(path))


def test_every_truncation_and_any_flipped_byte_is_an_error_of_ours(tmp_path: Path) -> None:
    content = Path(Written(tmp_path / "whole.gguf", kind="Q4_0").path).read_bytes()
    header = read_gguf_header(str(tmp_path / "whole.gguf"))
    rng = random.Random(0)
    cuts = [
        *range(0, header.data_offset, 7),
        *rng.sample(range(header.data_offset, len(content)), 20),
    ]
    # The writer pads the last tensor; a cut there loses nothing.
    last = max(info.offset + info.nbytes for info in header.tensors)
    for cut in (cut for cut in cuts if cut < last):
        path = tmp_path / f"cut{cut}.gguf"
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match="truncated|begins with"):
            read_gguf_header(str(path))
        path.unlink()
    for index in range(400):
        damaged = bytearray(content)
        damaged[rng.randrange(header.data_offset)] = rng.randrange(256)
        path = tmp_path / f"flip{index}.gguf"
        path.write_bytes(damaged)
        try:
            load_gguf_config(str(path))
            next(iter_gguf_tensors(str(path)))
        except ModelError:
            pass
        path.unlink()


def test_header_reads_what_gguf_writes(tmp_path: Path) -> None:
    keys = {"x.text": "größer", "x.list": [1, 2, 3], "x.words": ["a", "", "ß"], "x.float": 0.5}
    path = Written(tmp_path / "m.gguf", keys=keys).path
    header = read_gguf_header(path, with_tokenizer=True)
    assert {key: header.metadata[key] for key in keys} == keys
    assert header.metadata["tokenizer.ggml.tokens"] == [f"t{index}" for index in range(VOCAB)]
    reader = gguf.GGUFReader(path)
    theirs = [(t.name, int(t.data_offset), int(t.n_bytes)) for t in reader.tensors]
    assert [(t.name, t.offset, t.nbytes) for t in header.tensors] == theirs
    assert header.data_offset == reader.data_offset

    short = read_gguf_header(path)
    assert "tokenizer.ggml.tokens" not in short.metadata
    assert short.array_lengths["tokenizer.ggml.tokens"] == VOCAB
    assert short.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert read_gguf_header(path) is short


def test_type_table_is_ggufs() -> None:
    for number, form in GGML_TYPES.items():
        assert Type(number).name == form.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (form.block, form.block_bytes)
