"""`text_bound`: no text has fewer tokens than it says; where that is not certain there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.bounds import text_bound
from tests.unit.fake_async_engine import byte_tokenizer

MERGES = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("a", "b"), ("Ã", "ł")]


def byte_level() -> tokenizers.Tokenizer:
    vocab = {char: index for index, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    cut = pre_tokenizers.Split(Regex(r"\d| ?\w+|\s+"), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, last])
    backend.add_special_tokens(["<|end|>"])
    return backend


def composing() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def without_a_byte() -> tokenizers.Tokenizer:
    backend = byte_level()
    vocab = {token: index for token, index in backend.get_vocab(False).items() if token != "c"}
    backend.model = models.BPE(vocab=vocab, merges=MERGES)
    return backend


def byte_fallback(num_bytes: int = 256) -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁▁": 3, "▁a": 4}
    for byte in range(num_bytes):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "▁"), ("▁", "a")]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.add_tokens([AddedToken("<a b>", normalized=True)])
    return backend


SOUND = {
    "byte level": (byte_level, 7),
    "NFC": (composing, 4 * 7),
    "a byte without token": (without_a_byte, 7),
    "byte fallback": (byte_fallback, len("▁<a▁b>".encode())),
}
texts = st.text(st.sampled_from("abc 1▁é\u0301\u1fbe\u0308\u212a가\u1100\u1161\x00😀")) | st.text()


@pytest.mark.parametrize(("make", "size"), SOUND.values(), ids=SOUND)
def test_no_text_has_fewer_tokens(make: Callable[[], tokenizers.Tokenizer], size: int) -> None:
    backend = make()
    bound = text_bound(backend)
    assert bound is not None and bound.bytes_per_token == size

    @settings(max_examples=200, deadline=None)
    @given(texts.map(lambda text: text + text * 20))
    def check(text: str) -> None:
        assert bound.least_tokens(text) <= len(backend.encode(text).ids)

    check()
    longest = "<|end|><a b> <a b>" * 10
    assert 1 < bound.least_tokens(longest) <= len(backend.encode(longest).ids)
    assert bound.least_tokens("") == 0


def test_bytes_that_have_no_token_do_not_count() -> None:
    bound = text_bound(without_a_byte())
    assert bound is not None
    assert bound.least_tokens("c" * 1000) == 0 == len(without_a_byte().encode("c" * 1000).ids)
    assert bound.least_tokens("ca" * 700) == 100


def test_half_a_character_is_left_for_the_tokenizer_to_refuse() -> None:
    bound = text_bound(byte_level())
    assert bound is not None and bound.least_tokens("\ud800" * 7) == 3


def test_nfc_shrinks_no_text_to_less_than_a_fourth() -> None:
    """Each composed character, from its longest spelling."""
    longest: dict[str, int] = {}
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for char in chars:
        whole = unicodedata.normalize("NFD", char)
        longest[whole] = max(longest.get(whole, 0), len(char.encode()))
    for char in chars:
        if unicodedata.normalize("NFC", char) == char:
            parts = unicodedata.normalize("NFD", char)
            apart = sum(longest.get(part, len(part.encode())) for part in parts)
            assert max(apart, longest[parts]) < 4 * len(char.encode())


def unsound(change: str) -> tokenizers.Tokenizer:
    backend = byte_level()
    if change == "NFKC":
        backend.normalizer = normalizers.NFKC()
    elif change == "spaces that go":
        backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    elif change == "a replacement that is shorter":
        backend.normalizer = normalizers.Sequence([normalizers.Replace("aa", "a")])
    elif change == "a cut that drops":
        drops = pre_tokenizers.Split(" ", "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([drops, backend.pre_tokenizer])
    elif change == "a token that takes spaces":
        backend.add_tokens([AddedToken("<x>", rstrip=True)])
    elif change == "NFC, and a byte without token":
        backend = without_a_byte()
        backend.normalizer = normalizers.NFC()
    elif change == "no bytes":
        backend.pre_tokenizer = pre_tokenizers.Digits()
    elif change == "bytes that are unknown":
        backend = byte_fallback(num_bytes=128)
    elif change == "words":
        backend.model = models.WordLevel({"a": 0}, unk_token="a")
    return backend


UNSOUND = [
    "NFKC",
    "spaces that go",
    "a replacement that is shorter",
    "a cut that drops",
    "a token that takes spaces",
    "NFC, and a byte without token",
    "no bytes",
    "bytes that are unknown",
    "words",
]


@pytest.mark.parametrize("change", UNSOUND)
def test_where_text_may_get_lost_there_is_no_bound(change: str) -> None:
    assert text_bound(unsound(change)) is None


def test_every_tokenizer_knows_its_own(demo_model_path: Path) -> None:
    demo = Tokenizer.load(str(demo_model_path))
    assert demo.text_bound is not None and demo.text_bound.bytes_per_token == 81
    assert byte_tokenizer().text_bound == (len("<|begin|>"), b"")
