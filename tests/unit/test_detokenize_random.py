"""Deltas and stop strings with three real kinds of tokenizers, for any text, ids and cuts.

demo       byte-level BPE from a GGUF file
qwen       byte-level BPE from a tokenizer.json, with three times the vocabulary
metaspace  BPE with byte fallback as SentencePiece makes it, trained here
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from minisgl.tokenizer import IncrementalDetokenizer, Tokenizer
from minisgl.tokenizer.detokenize import TokenPieces
from tests.unit.test_detokenize import TEXTS, load, stream, wrap
from tests.unit.test_stop import expected, run

BYTE_LEVEL_KINDS = ["demo", "qwen"]
KINDS = [*BYTE_LEVEL_KINDS, "metaspace"]

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x..>")
# A window is a context of one token, or two where the first is a lone space that the start of a
# text loses, and the new one; then the next context is looked for by decoding one token or two.
DECODED_PER_TOKEN = 6


@functools.cache
def metaspace() -> Tokenizer:
    """Llama 2's kind: U+2581 begins a word, and a character that is no piece becomes its bytes."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    prose = Path(__file__).read_text("ascii")
    trained.train_from_iterator([prose], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        [tuple(merge) for merge in learned["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer = wrap(model, decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "metaspace":
        return metaspace()
    path = "demo_model_path" if request.param == "demo" else "qwen_tokenizer_path"
    return load(str(request.getfixturevalue(path)))


def only(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tokenizer", kinds, indirect=True)


texts = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(TEXTS)).map("".join))


@functools.cache
def half_characters(tokenizer: Tokenizer) -> list[int]:
    """The tokens that begin or end inside a character."""
    found = []
    for index in range(tokenizer.vocab_size):
        try:
            tokenizer.token_bytes(index).decode("utf-8")
        except UnicodeDecodeError:
            found.append(index)
    return found


def id_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of every sort in any order, and encoded texts that may lack their first tokens.

    Uniform ids would hardly ever be of the sorts that are hard: half characters, added tokens,
    and ids beyond the vocabulary, of which a padded output layer has some.
    """
    added = sorted(tokenizer.backend.get_added_tokens_decoder())
    one = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1),
        st.sampled_from(half_characters(tokenizer)),
        st.sampled_from([*added, tokenizer.vocab_size, tokenizer.vocab_size + 7]),
    )
    encoded = st.builds(
        lambda text, start: tokenizer.encode(text)[start:], texts, st.sampled_from([0, 0, 1])
    )
    chunks = st.lists(st.one_of(st.lists(one, max_size=6), encoded), max_size=6)
    return chunks.map(lambda parts: [index for part in parts for index in part])


def test_any_ids_give_the_full_decode_in_pieces(tokenizer: Tokenizer) -> None:
    @given(id_lists(tokenizer), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        want = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip)) == want

    check()


def test_any_text_comes_in_whole_characters(tokenizer: Tokenizer) -> None:
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        want = tokenizer.decode(ids)
        shown = ""
        for delta in stream(tokenizer, ids):
            shown += delta
            assert want.startswith(shown)  # no U+FFFD for a half of what is a character later
        assert shown == want

    check()


@only(*BYTE_LEVEL_KINDS)
def test_nothing_but_an_unfinished_character_is_held_back(tokenizer: Tokenizer) -> None:
    @given(id_lists(tokenizer), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        shown = ""
        for count, delta in enumerate(stream(tokenizer, ids, skip)[:-1], start=1):
            shown += delta
            so_far = tokenizer.decode(ids[:count], skip_special_tokens=skip)
            assert so_far.startswith(shown)
            # An unfinished character is one U+FFFD; the first two bytes of a surrogate are two,
            # and Python's decoder holds them though no third makes them a character.
            assert so_far[len(shown) :] in ("", REPLACEMENT, REPLACEMENT * 2)

    check()


@only("metaspace")
def test_nothing_but_a_run_of_byte_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        shown = ""
        for count, delta in enumerate(stream(tokenizer, ids)[:-1], start=1):
            shown += delta
            before_run = ids[:count]
            while before_run and BYTE_TOKEN.fullmatch(
                tokenizer.backend.id_to_token(before_run[-1]) or ""
            ):
                before_run.pop()
            assert shown.startswith(tokenizer.decode(before_run))

    check()


def test_stop_strings_end_any_ids_at_the_same_place_however_they_are_cut(
    tokenizer: Tokenizer,
) -> None:
    @given(id_lists(tokenizer), st.booleans(), st.data())
    def check(ids: list[int], include_stop: bool, data: st.DataObject) -> None:
        text = tokenizer.decode(ids)
        positions = st.integers(0, len(text))
        parts = st.builds(lambda at, size: text[at : at + size], positions, st.integers(1, 8))
        almost = st.builds(str.__add__, parts, st.sampled_from("a \ufffd"))
        stops = data.draw(st.lists(st.one_of(parts, almost).filter(bool), max_size=4), "stops")
        want = expected(text, stops, include_stop)
        assert run(stream(tokenizer, ids), stops, include_stop) == want
        borders = [0, *sorted(data.draw(st.lists(positions, max_size=8), "cuts")), len(text)]
        cut = [text[start:end] for start, end in itertools.pairwise(borders)]
        assert run(cut, stops, include_stop) == want

    check()


class CountingPieces(TokenPieces):
    """Counts what a detokenizer asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer.backend, tokenizer.special_ids)
        self.windows: list[int] = []  # how many tokens each call decoded
        self.tokens_read = 0

    def decode(self, token_ids: list[int]) -> str:
        self.windows.append(len(token_ids))
        return super().decode(token_ids)

    def raw_bytes(self, token_id: int) -> bytes:
        self.tokens_read += 1
        return super().raw_bytes(token_id)


def work(tokenizer: Tokenizer, ids: list[int]) -> CountingPieces:
    pieces = CountingPieces(tokenizer)
    detokenizer = IncrementalDetokenizer(pieces, skip_special_tokens=False)
    for index in ids:
        detokenizer.push(index)
    detokenizer.flush()
    return pieces


@only(*BYTE_LEVEL_KINDS)
def test_byte_level_tokens_are_read_once_and_nothing_is_decoded(tokenizer: Tokenizer) -> None:
    @given(id_lists(tokenizer))
    def check(ids: list[int]) -> None:
        done = work(tokenizer, ids)
        assert (done.tokens_read, done.windows) == (len(ids), [])

    check()


@only("metaspace")
def test_windows_do_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    @given(id_lists(tokenizer).filter(bool))
    def check(ids: list[int]) -> None:
        once, often = work(tokenizer, ids), work(tokenizer, ids * 20)
        assert sum(once.windows) <= DECODED_PER_TOKEN * len(ids) + 9  # and the flush
        assert sum(often.windows) <= DECODED_PER_TOKEN * len(ids) * 20 + 9

    check()


@only("metaspace")
def test_a_long_run_of_byte_tokens_is_decoded_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\u5b57" * 1000)
    assert len(ids) >= 3000  # no character of that kind is in the vocabulary
    assert sum(size > 9 for size in work(tokenizer, ids).windows) == 1
