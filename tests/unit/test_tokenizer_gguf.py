"""Tokenizers of GGUF files that are made here: SentencePiece and byte-level ones, damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from minisgl.errors import CheckpointError, UnsupportedModelError
from minisgl.tokenizer import Tokenizer


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> str:
    """A GGUF file with a tokenizer and nothing else."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in more.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


PIECES = ["▁", "t", "h", "e", "a", "b", "▁t", "he", "▁the", "the", "ab", "aba", "▁a", "▁▁", "é"]
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def write_sentencepiece(path: Path, **more: Any) -> str:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * len(PIECES) + [USER_DEFINED]
    scores = [0.0] * 259 + [-float(index) for index in range(len(PIECES))] + [0.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokens.append("<think>")
    return write_gguf(path, "llama", tokens, types, scores=scores, **ids, **more)


def test_sentencepiece_gguf_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "m.gguf"))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    for text in ["the aba", "a  the", "ababa the", "é字😀\n", "a<think>the</s>the", "the<s> a", ""]:
        ids = tokenizer.encode(text)
        assert ids == theirs(text).input_ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_ids == {1, 2}


def test_sentencepiece_gguf_joins_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "m.gguf"))
    pieces = [tokenizer.backend.id_to_token(index) for index in tokenizer.encode("the aba字")]
    # "ab" scores higher than "▁a" and comes first; no piece holds 字, so its bytes stand for it.
    assert pieces == ["<s>", "▁the", "▁", "aba", "<0xE5>", "<0xAD>", "<0x97>"]
    assert tokenizer.decode(tokenizer.encode("the aba字")) == "the aba字"
    assert tokenizer.token_bytes(tokenizer.encode("字")[-1]) == b"\x97"


def test_sentencepiece_gguf_flags(tmp_path: Path) -> None:
    flags = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "m.gguf", **flags))
    ids = tokenizer.encode("the")
    assert [tokenizer.backend.id_to_token(index) for index in ids] == ["the", "</s>"]
    assert tokenizer.encode("the", add_special_tokens=False) == ids[:1]
    word = tokenizer.backend.token_to_id("▁the")
    assert word is not None and tokenizer.decode([word]) == " the"


def write_byte_level(path: Path, pre: str | None, **more: Any) -> str:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "!1", "Ġ1", "ÄĬ", "<s>"]
    types = [1] * (len(tokens) - 1) + [CONTROL]
    merges = ["1 2", "12 3", "! 1", "Ġ 1"]
    names = {} if pre is None else {"pre": pre}
    bos = {"bos_token_id": len(tokens) - 1}
    return write_gguf(path, "gpt2", tokens, types, merges=merges, **names, **bos, **more)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        (None, "1234 1!1", ["123", "4", "Ġ1", "!", "1"]),
        ("gpt-2", "1234 1!1", ["123", "4", "Ġ1", "!", "1"]),
        ("smollm", "1234 1!1", ["1", "2", "3", "4", "Ġ", "1", "!", "1"]),
        ("qwen2", "1234 1!1", ["1", "2", "3", "4", "Ġ", "1", "!", "1"]),
        ("llama-bpe", "1234 1!1", ["<s>", "123", "4", "Ġ", "1", "!", "1"]),
    ],
)
def test_byte_level_gguf_pre_tokenizers(
    tmp_path: Path, pre: str | None, text: str, pieces: list[str]
) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", pre))
    ids = tokenizer.encode(text)
    assert [tokenizer.backend.id_to_token(index) for index in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_qwen2_gguf_composes_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "m.gguf", "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_unknown_kinds_of_gguf_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="martian.*smollm"):
        Tokenizer.load(write_byte_level(tmp_path / "a.gguf", "martian"))
    with pytest.raises(UnsupportedModelError, match="bert.*gpt2, llama"):
        Tokenizer.load(write_gguf(tmp_path / "b.gguf", "bert", ["a"], [1]))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "merges"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": ["a z"]}, "can't be built"),
        ({"merges": ["a b"], "eos_token_id": 9}, "eos_token_id = 9"),
    ],
)
def test_damaged_gguf_tokenizer(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], [1] * 3, **more))


def test_of_equal_tokens_the_first_keeps_its_id(tmp_path: Path) -> None:
    tokens, merges = ["a", "b", "ab", "a", "ab"], ["a b"]
    path = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, [1] * 5, merges=merges)
    assert Tokenizer.load(path).encode("abaab") == [2, 0, 2]
