"""Deltas joined are the full decode, for every kind of decoder and any ids."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.parts import TokenizerParts

TEXTS = ["The", " quick", "  two", "né", "中文字", "😀👍🏽", "\n\n", "\ufffd", "नमस्ते", "\r\t "]


def wrap(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    backend = Backend(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True), AddedToken("<tool>")]
    )
    return Tokenizer(TokenizerParts(backend))


@functools.cache
def byte_level() -> Tokenizer:
    """Every byte a token, a few words, and added tokens in and outside the byte alphabet."""
    words = ["he", "hell", "Ġhe", "ĠĠ", "Ġa", "ðŁĺ", "ä¸Ń", "Ń", "Ā"]
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = wrap(models.BPE(vocabulary, []), decoders.ByteLevel())
    tokenizer.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend.add_tokens([AddedToken("<｜中｜>"), AddedToken("é"), AddedToken("a b")])
    return Tokenizer(TokenizerParts(tokenizer.backend))


def metaspace_vocabulary() -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁▁▁", "▁a", "a", "b", "▁the", "the▁", "", "\ufffd", ".", "▁."]
    return {piece: index for index, piece in enumerate(pieces)}


@functools.cache
def byte_fallback(strip: bool) -> Tokenizer:
    """Llama's decoder: spaces from "▁", runs of byte tokens, one leading space dropped."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        parts.append(decoders.Strip(" ", 1, 0))
    model = models.BPE(
        metaspace_vocabulary(), [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = wrap(model, decoders.Sequence(parts))
    scheme = "first" if strip else "never"
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """The Metaspace decoder, which drops every space of the first token."""
    return wrap(models.BPE(metaspace_vocabulary(), [], unk_token="<unk>"), decoders.Metaspace())


@functools.cache
def word_piece() -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate(["un", "##able", "##s", "it", ".", "'", "s"])}
    return wrap(models.WordPiece(vocabulary, unk_token="un"), decoders.WordPiece())


@functools.cache
def no_decoder() -> Tokenizer:
    return wrap(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"), None)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": functools.partial(byte_fallback, True),
    "byte_fallback_no_strip": functools.partial(byte_fallback, False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "no_decoder": no_decoder,
}
ALL_KINDS = ["demo", *KINDS]
BYTE_KINDS = ["demo", "byte_level", "byte_fallback", "byte_fallback_no_strip"]


load = functools.cache(Tokenizer.load)


def build(kind: str, demo_model_path: Path) -> Tokenizer:
    return load(str(demo_model_path)) if kind == "demo" else KINDS[kind]()


def token_id(tokenizer: Tokenizer, token: str) -> int:
    index = tokenizer.backend.token_to_id(token)
    assert index is not None
    return index


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    """The deltas, the flush last."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_random_ids(kind: str, demo_model_path: Path) -> None:
    tokenizer = build(kind, demo_model_path)
    # Ids beyond the vocabulary: a model's output layer is often padded.
    ids = st.integers(0, tokenizer.vocab_size + 2)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(ids, max_size=30), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        want = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip)) == want

    check()


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_random_bytes(kind: str, demo_model_path: Path) -> None:
    """Runs of bytes near the borders of valid UTF-8, with ordinary tokens between them."""
    tokenizer = build(kind, demo_model_path)
    by_byte: dict[bytes, int] = {}
    for index in range(tokenizer.vocab_size):
        by_byte.setdefault(tokenizer.token_bytes(index), index)
    # Lead bytes of each length, continuations, surrogates, overlong forms, beyond U+10FFFF.
    marks = bytes.fromhex("00207fc0c1c2dfe0a0e2829aed9fbfeff09f98808090f48ff5ffbffe")
    chunks = [[by_byte[bytes([mark])]] for mark in marks if bytes([mark]) in by_byte]
    chunks += [
        tokenizer.encode(char)[-size:] for char, size in (("ß", 2), ("字", 3), ("😀", 4))
    ] * 4
    chunks += [[by_byte[b" a"]], [by_byte[b"a"]]] * 4

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(chunks), max_size=10))
    def check(chunks: list[list[int]]) -> None:
        ids = [index for chunk in chunks for index in chunk]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    check()


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_random_texts(kind: str, demo_model_path: Path) -> None:
    tokenizer = build(kind, demo_model_path)
    text = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(TEXTS)).map("".join))

    @settings(max_examples=100, deadline=None)
    @given(text)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        deltas = stream(tokenizer, ids)
        assert "".join(deltas) == tokenizer.decode(ids)
        if tokenizer.decode(ids) == text and "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)  # no half character

    check()


def test_metaspace_keeps_inner_spaces_and_drops_the_first() -> None:
    tokenizer = byte_fallback(True)
    ids = [token_id(tokenizer, piece) for piece in ("▁the", "▁", "▁▁", "a", "▁the")]
    assert stream(tokenizer, ids) == ["the", " ", "  ", "a", " the", ""]


def test_a_token_without_text_does_not_begin_the_text_anew() -> None:
    tokenizer = byte_fallback(True)
    ids = [token_id(tokenizer, piece) for piece in ("a", "", "▁a", "", "▁", "", "▁a")]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "a a  a"


def test_a_character_is_shown_when_it_is_complete() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.encode(" ")[0], *tokenizer.encode("😀"), tokenizer.encode("a")[0]]
    assert stream(tokenizer, ids) == [" ", "", "", "", "😀", "a", ""]


def test_an_unfinished_character_is_flushed_once() -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(index) for index in tokenizer.encode("😀")[:3]] == ["", "", ""]
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")


def test_a_special_token_inside_a_character_is_invisible() -> None:
    tokenizer = byte_fallback(True)
    first, second = tokenizer.encode("ß")[-2:]
    special = token_id(tokenizer, "<s>")
    assert "".join(stream(tokenizer, [first, special, second])) == "ß"
    assert "".join(stream(tokenizer, [first, special, second], False)) == "\ufffd<s>\ufffd"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_runaway_of_invalid_bytes_is_not_held(kind: str, demo_model_path: Path) -> None:
    tokenizer = build(kind, demo_model_path)
    continuation = next(
        i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80"
    )
    assert stream(tokenizer, [continuation] * 5) == ["\ufffd"] * 5 + [""]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_time_is_linear(kind: str, demo_model_path: Path) -> None:
    tokenizer = build(kind, demo_model_path)
    ids = [7 * i % tokenizer.vocab_size for i in range(20_000)]
    started = time.perf_counter()
    deltas = stream(tokenizer, ids)
    assert time.perf_counter() - started < 10  # 0.3 s; decoding everything each time: minutes
    assert "".join(deltas) == tokenizer.decode(ids)


def test_long_runs_of_bytes_are_linear() -> None:
    tokenizer = byte_fallback(True)
    for text in ("字" * 10_000, "字" * 5_000 + "\ufffe"):
        ids = tokenizer.encode(text)
        for some in (ids, ids[:-1], [*ids, *ids[:-1], ids[-2]]):
            started = time.perf_counter()
            assert "".join(stream(tokenizer, some)) == tokenizer.decode(some)
            assert time.perf_counter() - started < 10
