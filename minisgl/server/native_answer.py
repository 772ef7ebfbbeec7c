"""The answers of SGLang's native API: everything so far of one sequence, streamed or not.

What can be long is kept as JSON, to which each token adds its own: an event that repeats it all
only copies bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from minisgl.core import TokenLogprobs
from minisgl.message import SequenceDelta

from .generation import Generation
from .large import JsonList, apart, num_entries
from .logprobs import TokenTexts
from .native_protocol import GenerateRequest

__all__ = ["Answer", "Prompt"]

Shown = tuple[float | None, int, str | None]


class _Scores:
    """The log-probabilities of one side, `input` or `output`, as far as they are known."""

    def __init__(self, side: str, body: GenerateRequest, texts: TokenTexts) -> None:
        self._side = side
        self._top = body.top_logprobs_num
        self._texts = texts if body.return_text_in_logprobs else None
        self._tokens = JsonList()
        self._tops = JsonList()

    def add(self, token_ids: Iterable[int], entries: list[TokenLogprobs | None]) -> None:
        """Append those of tokens."""
        # Without strict: a sequence that was aborted may lack the prompt's last entries.
        self._tokens.extend(
            self._shown(token, None if entry is None else entry.logprob)
            for token, entry in zip(token_ids, entries, strict=False)
        )
        if self._top:
            self._tops.extend(
                None if entry is None else [self._shown(*pair) for pair in entry.top[: self._top]]
                for entry in entries
            )

    def fields(self) -> dict[str, Any]:
        """Their part of `meta_info`."""
        fields = {f"{self._side}_token_logprobs": self._tokens.raw()}
        return fields | ({f"{self._side}_top_logprobs": self._tops.raw()} if self._top else {})

    def _shown(self, token_id: int, logprob: float | None) -> Shown:
        # JSON has no minus infinity: null, as for what is not known.
        known = logprob if logprob is not None and logprob > float("-inf") else None
        return known, token_id, None if self._texts is None else self._texts[token_id].text


class Prompt:
    """What the answers of one prompt share."""

    def __init__(self, generation: Generation, body: GenerateRequest, texts: TokenTexts) -> None:
        self.generation = generation
        self._start = body.logprob_start_len
        self._scores = _Scores("input", body, texts)
        self._is_due = body.scores_prompt
        self.fields: dict[str, Any] = self._scores.fields() if body.return_logprob else {}
        """The prompt's log-probabilities, for `meta_info`."""

    async def prepare(self) -> None:
        """Write its log-probabilities, once they are here."""
        generation = self.generation
        prompt_len = len(generation.prompt_token_ids)
        if self._is_due and (generation.num_scored == prompt_len or generation.finished):
            self._is_due = False
            await apart(num_entries(prompt_len, generation.params, 0), self._write)

    def _write(self) -> None:
        """From `logprob_start_len` on; SGLang gives the first of them none, wherever it is."""
        scored = (self.generation.prompt_logprobs or [])[self._start :]
        if scored:
            ids = self.generation.prompt_token_ids[self._start :]
            self._scores.add(ids, [None, *scored[1:]])
            self.fields = self._scores.fields()


class Answer:
    """What is known of one sequence; `index` is shown if it is not None."""

    def __init__(
        self, prompt: Prompt, body: GenerateRequest, texts: TokenTexts, index: int | None
    ) -> None:
        self._prompt = prompt
        self._index = index
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._scores = _Scores("output", body, texts) if body.return_logprob else None
        self._finish: dict[str, Any] | None = None
        self._latency_s = 0.0

    def add(self, delta: SequenceDelta) -> None:
        """Append what came next."""
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        if self._scores is not None:
            self._scores.add(delta.token_ids, [*delta.logprobs])
        if delta.finish_reason is not None:
            self._finish = self._finished(delta)
            self._latency_s = time.monotonic() - self._prompt.generation.submitted_s

    def so_far(self) -> dict[str, Any]:
        """The answer's object."""
        answer = {
            "text": "".join(self._text),
            "output_ids": list(self._token_ids),
            "meta_info": self._meta_info(),
        }
        return answer if self._index is None else {**answer, "index": self._index}

    def _finished(self, delta: SequenceDelta) -> dict[str, Any]:
        kind = delta.finish_reason
        if kind == "stop":
            eos = self._token_ids[-1] if self._token_ids else None
            matched = delta.stop_reason if delta.stop_reason is not None else eos
            return {"type": "stop", "matched": matched}
        if kind == "length":
            return {"type": "length", "length": len(self._token_ids)}
        return {"type": "abort", "message": "the request was aborted"}

    def _meta_info(self) -> dict[str, Any]:
        generation = self._prompt.generation
        info: dict[str, Any] = {
            "id": generation.request_id,
            "finish_reason": self._finish,
            "prompt_tokens": len(generation.prompt_token_ids),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": generation.num_cached_tokens,
        }
        if self._finish is not None:
            info["e2e_latency"] = self._latency_s
        if self._scores is not None:
            info |= self._scores.fields() | self._prompt.fields
        return info
