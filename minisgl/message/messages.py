"""The messages, each a `msgspec.Struct`; `tag`s tell the members of a union apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from minisgl.core import Req, TokenLogprobs
from minisgl.params import SamplingParams

__all__ = [
    "Abort",
    "Answer",
    "Decode",
    "Deltas",
    "Encode",
    "EncodeChat",
    "EngineReady",
    "EngineStats",
    "Flush",
    "Flushed",
    "FromScheduler",
    "Refusal",
    "RequestStart",
    "SequenceDelta",
    "StartFailed",
    "StepDone",
    "StepTrace",
    "Submit",
    "TextReady",
    "ToFront",
    "ToScheduler",
    "ToTextWorker",
    "TokenUpdate",
    "make_reqs",
]


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Encoded as an array that begins with the class's name."""


# -- to the scheduler ------------------------------------------------------------------------


class Submit(_Message):
    """A prompt, checked, whose `params.n` sequences get the uids from `first_uid` on."""

    first_uid: int
    token_ids: list[int]
    params: SamplingParams
    """Complete: no field is None whose default the model gives."""
    seed: int
    stop_ids: list[int]
    """Ids that end a sequence."""
    eos_ids: list[int]
    """Ids that `min_tokens` bans, whether or not they stop."""
    priority: int = 0
    cache_salt: str | None = None
    route: int = 0
    """Which text worker the sequences' tokens go to."""


class Abort(_Message):
    """End these sequences; those that have ended already are no error."""

    uids: list[int]
    reason: Literal["stop", "abort"] = "abort"
    """`"stop"` when the text hit a stop string."""


class Flush(_Message):
    """Forget the prefix cache; answered by `Flushed`."""

    ticket: int


ToScheduler = Submit | Abort | Flush


def make_reqs(submit: Submit) -> list[Req]:
    """The `n` requests of a prompt."""
    params = submit.params
    assert params.max_tokens is not None
    others = replace(params, prompt_logprobs=None)  # the first sequence scores the prompt
    stop_ids, eos_ids = frozenset(submit.stop_ids), frozenset(submit.eos_ids)
    length = len(submit.token_ids)
    return [
        Req(
            uid=submit.first_uid + choice,
            token_ids=list(submit.token_ids),
            prompt_len=length,
            params=others if choice else params,
            max_len=length + params.max_tokens,
            seed=submit.seed,
            choice=choice,
            stop_ids=stop_ids,
            eos_ids=eos_ids,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
        )
        for choice in range(params.n)
    ]


# -- from the scheduler ----------------------------------------------------------------------


class EngineReady(_Message):
    """The model is loaded; what the front must know of it."""

    max_model_len: int
    max_running_requests: int
    capacity_tokens: int
    """What the KV cache holds."""
    num_pages: int
    page_size: int
    device: str
    dtype: str
    threads: int


class StartFailed(_Message):
    """The process could not start and has ended."""

    kind: str
    """Name of the exception's class; one of `minisgl.errors` is raised again as such."""
    message: str


class RequestStart(msgspec.Struct, array_like=True, frozen=True):
    """How a sequence came to its first token; times are of the system's monotonic clock."""

    num_cached_tokens: int
    received_s: float
    """The scheduler took the request from its socket."""
    started_s: float
    """It got its row and pages for the first time."""
    first_token_s: float


class TokenUpdate(msgspec.Struct, array_like=True, frozen=True):
    """What one step changed for one sequence; the last one has `finish_reason`."""

    uid: int
    token_id: int | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    start: RequestStart | None = None
    """With the first token only."""


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """The state after a step; counts are since the start."""

    time_s: float
    """Monotonic clock, when the step ended."""
    step_s: float
    """How long it took."""
    num_running: int
    num_waiting: int
    num_pages: int
    num_used_pages: int
    """Pages that requests hold; those only cached can be had back at any time."""
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_retractions: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return self.num_used_pages / self.num_pages

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the model, of prompts and of output."""
        return self.num_prefill_tokens + self.num_decode_tokens


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """What a step computed, and when; times are of the system's monotonic clock.

    The host does one thing after another, plans, launches and reads; with overlap it reads the step
    before in between.
    """

    number: int
    """From 1."""
    num_reqs: int
    num_decode_tokens: int
    num_prefill_tokens: int
    is_replayed: bool
    """By a CUDA graph."""
    plan_s: float
    launch_s: float
    """Planned, the launch begins."""
    launched_s: float
    device_s: float
    """The device begins; on a CPU with the launch."""
    device_end_s: float
    read_s: float
    """The host begins to wait for the result."""
    read_end_s: float


class StepDone(_Message):
    """What a step did to the sequences of one text worker."""

    updates: list[TokenUpdate]
    stats: EngineStats
    steps: list[StepTrace] = []
    """Those whose results were read meanwhile, each told to one worker, if they are traced."""


class Flushed(_Message):
    """The answer to `Flush`."""

    ticket: int
    num_pages: int


FromScheduler = EngineReady | StartFailed | StepDone | Flushed


# -- to and from text workers ----------------------------------------------------------------


class Encode(_Message):
    """Text to ids; answered by `Answer` or `Refusal`."""

    ticket: int
    text: str
    add_special_tokens: bool


class EncodeChat(_Message):
    """Messages to ids through the chat template; answered by `Answer` or `Refusal`."""

    ticket: int
    messages: list[dict[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


class Decode(_Message):
    """Ids to text; answered by `Answer` or `Refusal`."""

    ticket: int
    token_ids: list[int]
    skip_special_tokens: bool


class Answer(_Message):
    """The result that a ticket asked for."""

    ticket: int
    token_ids: list[int] = []
    text: str = ""


class Refusal(_Message):
    """The error that a ticket met: a class of `minisgl.errors` by name, or another's name."""

    ticket: int
    kind: str
    message: str
    param: str | None = None


class SequenceDelta(msgspec.Struct, array_like=True):
    """What a step added to the text of one sequence; the last one has `finish_reason`."""

    uid: int
    text: str
    """May be empty: half a character, or what might become a stop string, is held back."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One a token when they were asked for, else empty."""
    finish_reason: str | None = None
    """`"stop"`, `"length"`, `"abort"` or `"error"`."""
    stop_reason: int | str | None = None
    """The stop id (other than EOS) or the stop string that ended it."""
    prompt_logprobs: list[TokenLogprobs] = []
    start: RequestStart | None = None
    """With the first token only."""


class Deltas(_Message):
    """What a step did, as text."""

    deltas: list[SequenceDelta]
    stats: EngineStats
    steps: list[StepTrace] = []
    """Those of `StepDone`."""


class TextReady(_Message):
    """A text worker has loaded its tokenizer."""

    index: int


ToTextWorker = Encode | EncodeChat | Decode | Submit | Abort | StepDone
ToFront = FromScheduler | Answer | Refusal | Deltas | TextReady
