"""The text of all sequences that one process follows: tokens in, deltas out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minisgl.llm.sequence import Sequence
from minisgl.message import SequenceDelta, Submit, TokenUpdate
from minisgl.tokenizer import Tokenizer

__all__ = ["SequenceTracker"]


class SequenceTracker:
    """Detokenizes and finds stop strings; `stop(uids)` is called for those that hit one.

    A sequence whose text hit a stop string ends here at once; what the scheduler computes of it
    until it hears of that is dropped.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Callable[[list[int]], None]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._sequences: dict[int, Sequence] = {}

    def open(self, submit: Submit) -> None:
        """Follow the sequences of a prompt; before it is sent to the scheduler."""
        for index in range(submit.params.n):
            uid = submit.first_uid + index
            self._sequences[uid] = Sequence(uid, submit.params, self._tokenizer, index)

    def drop(self, submit: Submit) -> None:
        """Follow them no more: the prompt could not be sent."""
        for index in range(submit.params.n):
            self._sequences.pop(submit.first_uid + index, None)

    def push(self, updates: Iterable[TokenUpdate]) -> list[SequenceDelta]:
        """What a step did to the sequences followed here."""
        deltas, stopped = [], []
        for update in updates:
            sequence = self._sequences.get(update.uid)
            if sequence is None:  # it hit a stop string before
                continue
            if sequence.push(update):
                stopped.append(update.uid)
                sequence.push(TokenUpdate(update.uid, finish_reason="stop"))
            piece = sequence.take()
            if sequence.finish_reason is not None:
                del self._sequences[update.uid]
            if piece is not None:
                deltas.append(
                    SequenceDelta(
                        update.uid,
                        piece.text,
                        piece.token_ids,
                        piece.logprobs,
                        piece.finish_reason,
                        piece.stop_reason,
                        piece.prompt_logprobs,
                        update.start,
                    )
                )
        if stopped:
            self._stop(stopped)
        return deltas
