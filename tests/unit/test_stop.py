"""Stop strings: the checker against the definition, spelled out by brute force."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import InvalidRequestError
from minisgl.tokenizer import StopResult, StopStringChecker
from minisgl.tokenizer import stop as stop_module


def expected(text: str, stops: list[str], include_stop: bool) -> StopResult:
    """The text up to the first place where a stop string ends, the longest one there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return StopResult(text[:end] if include_stop else text[: end - len(stop)], stop)
    return StopResult(text, None)


def run(deltas: list[str], stops: list[str], include_stop: bool = False) -> StopResult:
    checker = StopStringChecker(stops, include_stop=include_stop)
    text = "".join(checker.push(delta).text for delta in deltas) + checker.flush()
    return StopResult(text, checker.matched)


# Few letters, so that stop strings overlap themselves, each other and the deltas' borders.
letters = st.text("ab", max_size=6)


@settings(max_examples=400, deadline=None)
@given(st.lists(letters, max_size=8), st.lists(letters.filter(bool), max_size=4), st.booleans())
def test_equals_the_definition(deltas: list[str], stops: list[str], include_stop: bool) -> None:
    want = expected("".join(deltas), stops, include_stop)
    assert run(deltas, stops, include_stop) == want


@settings(max_examples=200, deadline=None)
@given(st.lists(letters, max_size=8), st.lists(letters.filter(bool), min_size=1, max_size=4))
def test_holds_back_no_more_than_may_become_a_stop_string(
    deltas: list[str], stops: list[str]
) -> None:
    checker = StopStringChecker(stops)
    seen = emitted = ""
    for delta in deltas:
        seen += delta
        result = checker.push(delta)
        emitted += result.text
        if result.matched is not None:
            break
        lengths = range(max(map(len, stops)))
        held = max(
            n for n in lengths if n == 0 or any(s[:n] == seen[-n:] for s in stops if n < len(s))
        )
        assert emitted == seen[: len(seen) - held]


def test_split_over_deltas_and_nothing_after_the_match() -> None:
    checker = StopStringChecker(["\nUser:"])
    assert checker.push("Hello") == ("Hello", None)
    assert checker.push("!\nUs") == ("!", None)
    assert checker.push("er: more") == ("", "\nUser:")
    assert checker.push("even more") == ("", "\nUser:")
    assert checker.flush() == ""
    assert checker.matched == "\nUser:"


def test_held_text_is_given_back() -> None:
    checker = StopStringChecker(["STOP"])
    assert checker.push("a ST") == ("a ", None)
    assert checker.push("AR") == ("STAR", None)
    assert checker.push("STO") == ("", None)
    assert checker.flush() == "STO"
    assert checker.flush() == ""


def test_sequences_with_the_same_stop_strings_share_no_state() -> None:
    first, second = StopStringChecker(["STOP"]), StopStringChecker(["STOP"])
    assert first.push("ST") == ("", None)
    assert second.push("OP") == ("OP", None)
    assert first.push("OP") == ("", "STOP")
    assert second.push("ST") == ("", None)
    assert second.flush() == "ST"


def test_automata_are_made_once_for_all_sequences() -> None:
    made = []

    class Counted(stop_module._Automaton):
        def __init__(self, text: str) -> None:
            made.append(text)
            super().__init__(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_module, "_Automaton", Counted)
        for _ in range(128):
            StopStringChecker(["made once", "made once", "and this"])
    assert sorted(made) == ["and this", "made once"]


def test_include_stop() -> None:
    assert run(["abc", "de"], ["cd"], include_stop=True) == ("abcd", "cd")


def test_longer_of_two_that_end_together() -> None:
    assert run(["xx end"], ["end", "x end"]) == ("x", "x end")


def test_no_stop_strings() -> None:
    assert run(["a", "", "b"], []) == ("ab", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopStringChecker(["a", ""])


def test_long_stop_string_costs_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    started = time.perf_counter()
    assert run(["aaaa"] * 10_000, [stop]) == ("a" * 40_000, None)
    assert time.perf_counter() - started < 5  # 0.1 s; comparing prefixes takes minutes
