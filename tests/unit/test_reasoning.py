"""Thinking models' answers: the splitter against the definition, spelled out on the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer import ReasoningSplitter, SplitText


def expected(text: str, inside: bool, tags: tuple[str, str] = ("<think>", "</think>")) -> SplitText:
    """The two parts of a whole text."""
    open_tag, close_tag = tags
    if not inside:
        if not text.lstrip().startswith(open_tag):
            return SplitText("", text)
        text = text.lstrip()[len(open_tag) :]
    reasoning, found, content = text.lstrip().partition(close_tag)
    return SplitText(reasoning.rstrip() if found else reasoning, content.lstrip())


def joined(splitter: ReasoningSplitter, deltas: list[str]) -> SplitText:
    parts = [splitter.push(delta) for delta in deltas] + [splitter.flush()]
    return SplitText("".join(p.reasoning for p in parts), "".join(p.content for p in parts))


# Whole tags, their pieces, white space and letters: tags begin, fail and repeat at every border.
tokens = st.sampled_from(
    ["<think>", "</think>", "<", "</", "</thi", "think>", "nk>", " ", "\n", "\u00a0", "a", "é<b"]
)
texts = st.lists(tokens, max_size=14).map("".join) | st.builds(
    "{}<think>{}</think>{}".format, *[st.lists(tokens, max_size=5).map("".join)] * 3
)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in deltas, empty ones among them."""
    text = draw(texts)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=1000, deadline=None)
@given(cut_texts(), st.booleans())
def test_however_it_is_cut_a_text_is_split_as_a_whole(deltas: list[str], inside: bool) -> None:
    want = expected("".join(deltas), inside)
    assert joined(ReasoningSplitter(inside=inside), deltas) == want
    assert joined(ReasoningSplitter(inside=inside), list("".join(deltas))) == want


@settings(max_examples=300, deadline=None)
@given(st.text("ab \n", max_size=20), st.booleans(), st.integers(1, 5))
def test_any_tags_will_do(text: str, inside: bool, size: int) -> None:
    # These begin with their own ends, unlike <think>.
    splitter = ReasoningSplitter("aba", "abaab", inside=inside)
    deltas = [text[i : i + size] for i in range(0, len(text), size)]
    assert joined(splitter, deltas) == expected(text, inside, ("aba", "abaab"))


# How a text may go on: not at all, with letters, with either tag or the rest of one begun.
ENDINGS = ["", "a", *(f"{tag[i:]}b" for tag in ("<think>", "</think>") for i in range(len(tag)))]


@settings(max_examples=300, deadline=None)
@given(cut_texts(), st.booleans())
def test_holds_back_no_more_than_what_may_still_come_to_nothing(
    deltas: list[str], inside: bool
) -> None:
    splitter = ReasoningSplitter(inside=inside)
    seen = ""
    emitted = SplitText("", "")
    for delta in deltas:
        seen += delta
        part = splitter.push(delta)
        emitted = SplitText(emitted.reasoning + part.reasoning, emitted.content + part.content)
        wholes = [expected(seen + more, inside) for more in ENDINGS]
        for part_name in ("reasoning", "content"):
            certain = _common([getattr(whole, part_name) for whole in wholes])
            assert getattr(emitted, part_name) == certain


def _common(texts: list[str]) -> str:
    """The longest beginning that all have."""
    first, last = min(texts), max(texts)
    length = next((i for i, char in enumerate(first) if char != last[i]), len(first))
    return first[:length]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        (" \n<think>\n\na\n b \n</think>\n\n b\n", "a\n b", "b\n"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("<think>a</think>\n\n", "a", ""),
        ("<think>a \n", "a \n", ""),  # cut off for its length
        ("<think> \n", "", ""),
        ("<think>a </thi", "a </thi", ""),
        ("<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        (" \n b", "", " \n b"),
        (" <thi", "", " <thi"),
        ("a <think>b</think>", "", "a <think>b</think>"),
        ("b</think>c", "", "b</think>c"),
        ("", "", ""),
    ],
)
def test_each_case_of_a_prompt_that_opened_no_tag(text: str, reasoning: str, content: str) -> None:
    for deltas in ([text], list(text)):
        assert joined(ReasoningSplitter(inside=False), deltas) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\na </think>\n\nb", "a", "b"),
        ("</think>b", "", "b"),
        (" a ", "a ", ""),
        ("<think>a</think>b", "<think>a", "b"),
    ],
)
def test_each_case_of_a_prompt_that_opened_the_tag(text: str, reasoning: str, content: str) -> None:
    for deltas in ([text], list(text)):
        assert joined(ReasoningSplitter(inside=True), deltas) == (reasoning, content)


def test_a_tag_over_deltas_and_what_is_held_back_for_it() -> None:
    splitter = ReasoningSplitter(inside=False)
    assert splitter.push(" <th") == ("", "")
    assert splitter.push("ink>I") == ("I", "")
    assert splitter.push(" see. </") == (" see.", "")
    assert splitter.push("em> So\n") == (" </em> So", "")
    assert splitter.push("</think") == ("", "")
    assert splitter.push("> ") == ("", "")
    assert splitter.push("Yes </think>") == ("", "Yes </think>")
    assert splitter.flush() == ("", "")


def test_after_a_flush_the_text_goes_on_in_the_same_state() -> None:
    splitter = ReasoningSplitter(inside=False)
    splitter.push("<think>Let me ")
    assert splitter.flush() == (" ", "")
    assert splitter.push(" see </think> b") == (" see", "b")


@pytest.mark.parametrize(
    "piece", ["\n", "a ", "<", "</think", "<think>"], ids=["blank", "words", "<", "close", "open"]
)
@pytest.mark.parametrize("begin", ["", "<think>", "<think>a"])
def test_what_is_read_again_does_not_grow(begin: str, piece: str) -> None:
    # Linear as long as a delta is read together with no more than the beginning of a tag.
    splitter = ReasoningSplitter(inside=False)
    splitter.push(begin)
    for _ in range(1000):
        splitter.push(piece)
        assert len(splitter._tag) < len("</think>")
