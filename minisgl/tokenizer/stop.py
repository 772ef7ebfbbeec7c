"""Stop strings, found in text that arrives in pieces.

Each stop string has one Knuth-Morris-Pratt automaton. Its state after a character is the length
of the longest suffix of the text so far that is a prefix of the stop string, so

    text so far   ... h e l l o , \\n U s e
                                 |<- state of "\\nUser" = 4 ->|
                  already emitted | held back

the largest of the states is exactly what might still become a stop string. One character costs
one step per stop string (amortized), whatever the strings' lengths and however deltas are cut.
The automata are made once for all sequences that have the same stop strings; a sequence has their
states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidRequestError

__all__ = ["StopResult", "StopStringChecker"]


class StopResult(NamedTuple):
    """What one delta made certain: the text to emit, and the stop string that ended it."""

    text: str
    matched: str | None


class StopStringChecker:
    """Cuts a stream of text at the first place where any of `stops` ends.

    Of two that end at the same place the one that starts earlier, the longer one, counts. With
    `include_stop` the stop string itself is emitted too. `matched` is the stop string found,
    None until then. Raises InvalidRequestError for an empty stop string.

    >>> checker = StopStringChecker(["STOP"])
    >>> [checker.push(delta) for delta in ("a S", "TO", "ST", "OP b")]  # doctest: +ELLIPSIS
    [...('a ', None), ...('', None), ...('STO', None), ...('', 'STOP')]
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if isinstance(stops, str):
            stops = [stops]
        if not all(stops):
            raise InvalidRequestError(
                f"A stop string is empty in stop={list(stops)!r}; remove it", "stop"
            )
        self.matched: str | None = None
        self._automata, self._first_chars = _compiled(tuple(stops))
        self._states = [0] * len(self._automata)
        self._include_stop = include_stop
        self._held = ""

    def push(self, delta: str) -> StopResult:
        """Add `delta`; the text that no stop string can begin in any more, and any match.

        After a match every further call emits nothing and repeats the matched stop string.
        """
        if self.matched is not None:
            return StopResult("", self.matched)
        if not self._held and self._first_chars.isdisjoint(delta):
            return StopResult(delta, None)  # the usual case: no stop string begins here
        text = self._held + delta
        for end, char in enumerate(delta, start=len(self._held) + 1):
            for index, automaton in enumerate(self._automata):
                state = self._states[index] = automaton.extend(self._states[index], char)
                if state == len(automaton.stop):
                    return self._finish(text[:end], automaton.stop)
        cut = len(text) - max(self._states)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """The text still held back at the end of the stream: it was no stop string after all."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._automata)
        return held

    def _finish(self, text: str, stop: str) -> StopResult:
        self.matched, self._held = stop, ""
        return StopResult(text if self._include_stop else text[: -len(stop)], stop)


class _Automaton:
    """One stop string. Invariant: the first `state` characters of it are a suffix of the text so
    far, and no longer prefix of it is."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # border[n]: length of the longest proper prefix of stop[:n] that is also its suffix.
        self._border = [0, 0]
        for char in stop[1:]:
            self._border.append(self.extend(self._border[-1], char))

    def extend(self, state: int, char: str) -> int:
        """The state after one more character; the string's length when it is complete."""
        while state and self.stop[state] != char:
            state = self._border[state]
        return state + 1 if self.stop[state] == char else 0


@functools.lru_cache(maxsize=16)  # of requests that come one after another, most have the same
def _compiled(stops: tuple[str, ...]) -> tuple[list[_Automaton], frozenset[str]]:
    """The automata of the stop strings, and the characters that these begin with."""
    # Longest first, so that the first hit at a position is the one that starts earliest.
    automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
    return automata, frozenset(stop[0] for stop in stops)
