"""The answers of SGLang's native API: everything so far of one sequence, streamed or not."""

from __future__ import annotations

import time
from typing import Any

from minisgl.core import TokenLogprobs
from minisgl.message import SequenceDelta

from .generation import Generation
from .logprobs import TokenTexts
from .native_protocol import GenerateRequest

__all__ = ["Answer"]


class Answer:
    """What is known of one sequence; `index` is shown if it is not None."""

    def __init__(
        self, generation: Generation, body: GenerateRequest, texts: TokenTexts, index: int | None
    ) -> None:
        self._generation = generation
        self._body = body
        self._index = index
        self._texts = texts
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._finish: dict[str, Any] | None = None
        self._latency_s = 0.0

    def add(self, delta: SequenceDelta) -> None:
        """Append what came next."""
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self._finish = self._finished(delta)
            self._latency_s = time.monotonic() - self._generation.submitted_s

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
        generation = self._generation
        info: dict[str, Any] = {
            "id": generation.request_id,
            "finish_reason": self._finish,
            "prompt_tokens": len(generation.prompt_token_ids),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": generation.num_cached_tokens,
        }
        if self._finish is not None:
            info["e2e_latency"] = self._latency_s
        if self._body.return_logprob:
            self._add_logprobs(info, "output", self._token_ids, self._logprobs)
            self._add_logprobs(info, "input", *self._scored_prompt())
        return info

    def _scored_prompt(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The prompt's tokens from `logprob_start_len` on as far as they are scored; SGLang gives
        the first of them no logprob, wherever it is."""
        if not self._body.scores_prompt:
            return [], []
        start = self._body.logprob_start_len
        scored = (self._generation.prompt_logprobs or [])[start:]
        return self._generation.prompt_token_ids[start:], [None, *scored[1:]] if scored else []

    def _add_logprobs(
        self,
        info: dict[str, Any],
        side: str,
        token_ids: list[int],
        entries: list[TokenLogprobs | None],
    ) -> None:
        # Without strict: a sequence that was aborted may lack the prompt's last entries.
        info[f"{side}_token_logprobs"] = [
            self._shown(token, None if entry is None else entry.logprob)
            for token, entry in zip(token_ids, entries, strict=False)
        ]
        top = self._body.top_logprobs_num
        if top:
            info[f"{side}_top_logprobs"] = [
                None if entry is None else [self._shown(*pair) for pair in entry.top[:top]]
                for entry in entries
            ]

    def _shown(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        # JSON has no minus infinity: null, as for what is not known.
        known = logprob if logprob is not None and logprob > float("-inf") else None
        text = self._texts[token_id].text if self._body.return_text_in_logprobs else None
        return known, token_id, text
