"""The bodies of SGLang's native API.

What SGLang knows and minisgl has not is taken only with the values that ask for nothing, as
SGLang's clients send them whether they want the feature or not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, model_validator

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequestError
from minisgl.params import MAX_N

from .errors import shorten
from .openai import MAX_REQUEST_ID
from .protocol import Body
from .protocol.base import Neutral
from .protocol.completion import MAX_PROMPTS, IdLists, Ids, Text, Texts, check_ids
from .protocol.sampling import (
    INT64,
    Count,
    Logprobs,
    Penalty,
    Probability,
    StopIds,
    StopString,
    StopStrings,
)

__all__ = ["AbortRequest", "GenerateRequest", "NativeSampling"]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


def _texts(value: Any) -> Any:
    if not isinstance(value, str):
        for index, item in enumerate(_batch(value, "must be a string or a list of strings")):
            if not isinstance(item, str):
                raise ValueError(f"has {shorten(item)} at [{index}]: must be a string")
    return value


def _token_ids(value: Any) -> Any:
    what = "must be a list of token ids or a list of such lists"
    several = isinstance(value, list) and value and isinstance(value[0], list)
    for row in _batch(value, what) if several else [value]:
        if not isinstance(row, list) or not row:
            raise ValueError(what)
        check_ids(row)
    return value


def _request_ids(value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        is_text = isinstance(item, str) and item.isascii() and item.isprintable()
        if not is_text or not 0 < len(item) <= MAX_REQUEST_ID:  # it comes back in a header
            raise ValueError(
                f"has {shorten(item)}: must be 1 to {MAX_REQUEST_ID} printable ASCII characters"
            )
    return value


def _batch(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(what)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"has {len(value)} prompts: at most {MAX_PROMPTS} go into one request")
    return value


_STRUCTURED = Neutral("structured output")
_LIST: tuple[Any, ...] = ([], "")
_OFF = (False,)


class NativeSampling(Body):
    """How the tokens are chosen and when the text ends.

    Where no default is given, the model's `generation_config.json` has it, then OpenAI's.
    """

    neutral = {
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _STRUCTURED),
        "custom_params": Neutral("logits processor of a client's", ({},)),
        "logit_bias": Neutral("logit bias in this API; /v1/completions has it", ({},)),
        "spaces_between_special_tokens": Neutral("choice here", (True,)),
        "stop_regex": Neutral("stop by regular expression", _LIST),
        "stream_interval": Neutral("choice of a stream's steps", (1,)),
    }

    max_new_tokens: Count = 128
    """Most tokens to generate; cut to what fits into the context."""
    min_new_tokens: Annotated[int, Field(ge=0, le=INT64 - 1)] = 0
    """No end-of-text or stop token before this many; at most `max_new_tokens`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 and anything below 1e-5 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the fewest most likely tokens whose probabilities reach this."""
    top_k: Annotated[int, Field(ge=-1, le=INT64 - 1)] | None = None
    """Keep this many most likely tokens; -1 and 0 keep all."""
    min_p: Probability | None = None
    """Keep tokens at least this likely relative to the most likely one."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time it was generated so far."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each token generated so far."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides (multiplies, if negative) the logits of tokens in prompt and output."""
    stop: Annotated[
        StopStrings, BeforeValidator(_listed, json_schema_input_type=StopString | StopStrings)
    ] = []
    """A string of up to 1024 characters that ends the text, or up to 16 of them."""
    stop_token_ids: StopIds = []
    """Token ids, up to 128, that end the text besides the model's own."""
    no_stop_trim: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Sequences to generate for each prompt; the server may have a lower limit."""
    sampling_seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1)] | None = None
    """The same request with the same seed samples the same tokens."""

    @model_validator(mode="after")
    def _agrees(self) -> NativeSampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens = {self.min_new_tokens} is above max_new_tokens = "
                f"{self.max_new_tokens}",
                "min_new_tokens",
            )
        return self

    def to_params(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters; what was left out is None if the model has its default."""
        values = {_RENAMED.get(name, name): value for name, value in self}
        return SamplingParams(**values, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}


RequestId = Annotated[str, Field(max_length=MAX_REQUEST_ID, pattern="^[ -~]+$")]
RequestIds = Annotated[list[RequestId], Field(min_length=1, max_length=MAX_PROMPTS)]
Samplings = Annotated[list[NativeSampling], Field(min_length=1, max_length=MAX_PROMPTS)]


class GenerateRequest(Body):
    """One prompt or several, as text or as token ids."""

    neutral = {
        **dict.fromkeys(("image_data", "video_data", "audio_data"), Neutral("images", _LIST)),
        **dict.fromkeys(("lora_path", "lora_id"), Neutral("LoRA adapter", _LIST)),
        **dict.fromkeys(
            ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
            Neutral("disaggregated prefill", ("",)),
        ),
        **dict.fromkeys(
            ("return_routed_experts", "return_indexer_topk", "routed_experts_start_len"),
            Neutral("output of routed experts", (False, 0)),
        ),
        "background": Neutral("background processing", _OFF),
        "custom_labels": Neutral("label of a client's in the metrics", ({},)),
        "custom_logit_processor": Neutral("logits processor of a client's", _LIST),
        "data_parallel_rank": Neutral("second replica", (0,)),
        "input_embeds": Neutral("input of embeddings", _LIST),
        "log_metrics": Neutral("request without metrics", (True,)),
        "modalities": Neutral("images", _LIST),
        "no_logs": Neutral("request without logs", _OFF),
        "return_bytes": Neutral("output of bytes", _OFF),
        "return_entropy": Neutral("output of entropies", _OFF),
        "return_hidden_states": Neutral("output of hidden states", _OFF),
        "require_reasoning": Neutral("parser of reasoning", _OFF),
        "return_prompt_token_ids": Neutral("output of the prompt's ids", _OFF),
        "session_params": Neutral("session", ({},)),
        "token_ids_logprob": Neutral("log-probabilities of chosen tokens", _LIST),
    }

    model: str | None = None
    """The served model's name; `unknown` is no name, but what SGLang's router sends for none."""
    text: Annotated[
        str | list[str] | None, PlainValidator(_texts, json_schema_input_type=Text | Texts)
    ] = None
    """A text, or several: up to 1024. Either `text` or `input_ids` is needed."""
    input_ids: Annotated[
        list[int] | list[list[int]] | None,
        PlainValidator(_token_ids, json_schema_input_type=Ids | IdLists),
    ] = None
    """Token ids of a prompt, or a list of them for each of several."""
    sampling_params: Annotated[
        Samplings,
        FailFast(),
        BeforeValidator(_listed, json_schema_input_type=NativeSampling | Samplings),
    ] = [NativeSampling()]
    """For all prompts, or a list with one for each."""
    stream: bool = False
    """Send server-sent events, each with all there is so far."""
    return_logprob: bool = False
    """Return log-probabilities of the tokens generated."""
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT64 - 1)] = -1
    """With `return_logprob`, return those of the prompt's tokens from this place on as well; -1
    for none. The first of them has null."""
    top_logprobs_num: Logprobs = 0
    """With `return_logprob`, return those of this many most likely tokens at each place."""
    return_text_in_logprobs: bool = False
    """Give the tokens' texts with their log-probabilities."""
    rid: Annotated[
        str | list[str] | None,
        PlainValidator(_request_ids, json_schema_input_type=RequestId | RequestIds),
    ] = None
    """Id of the request, by which it can be aborted; a list gives each prompt its own."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Smaller runs earlier."""
    extra_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only requests with the same key share cached prefixes."""

    @model_validator(mode="after")
    def _agrees(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("give either text or input_ids")
        count = len(self.prompts())
        if len(self.sampling_params) not in (1, count):
            raise _wrong_count("sampling_params", len(self.sampling_params), count)
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise _wrong_count("rid", len(self.rid), count)
            if len(set(self.rid)) < count:
                raise InvalidRequestError("rid has an id twice: they must differ", "rid")
        if self.top_logprobs_num and not self.return_logprob:
            raise InvalidRequestError(
                "top_logprobs_num needs return_logprob = true", "top_logprobs_num"
            )
        return self

    @property
    def field(self) -> Literal["text", "input_ids"]:
        """Which parameter has the prompts."""
        return "input_ids" if self.text is None else "text"

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: of several prompts (or a list of one) or sequences."""
        value: Any = self.input_ids[0] if self.input_ids else self.text
        return isinstance(value, list) or any(one.n > 1 for one in self.sampling_params)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.return_logprob and self.logprob_start_len >= 0

    def prompts(self) -> list[Any]:
        """The prompts, each a string or a list of token ids."""
        if self.text is not None:
            return self.text if isinstance(self.text, list) else [self.text]
        assert self.input_ids is not None
        several = isinstance(self.input_ids[0], list)
        return [*self.input_ids] if several else [self.input_ids]

    def params(self, max_n: int) -> list[SamplingParams]:
        """The engine's parameters of each prompt; `max_n` is the server's limit."""
        top = self.top_logprobs_num
        for one in self.sampling_params:
            if one.n > max_n:
                raise InvalidRequestError(
                    f"n = {one.n} must be at most {max_n}, this server's --max-n", "n"
                )
        made = [
            one.to_params(top if self.return_logprob else None, top if self.scores_prompt else None)
            for one in self.sampling_params
        ]
        return made if len(made) > 1 else made * len(self.prompts())


def _wrong_count(name: str, entries: int, prompts: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} has {entries} entries for {prompts} prompts: give one for all, or a list with "
        "one for each",
        name,
    )


class AbortRequest(Body):
    """Which requests to end."""

    neutral = {"abort_message": Neutral("message of a client's", ("",))}

    rid: str | None = None
    """The id of one; it may have ended, or never been here."""
    abort_all: bool = False
    """End all."""

    @model_validator(mode="after")
    def _names_some(self) -> AbortRequest:
        if bool(self.rid) == self.abort_all:
            raise InvalidRequestError("give either the rid of a request or abort_all = true", "rid")
        return self
