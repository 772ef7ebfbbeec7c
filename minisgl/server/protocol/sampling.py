"""`SamplingBody`: the parameters that chat and plain completions share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator

from minisgl.errors import InvalidRequestError
from minisgl.params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    SamplingParams,
)

from ..errors import shorten
from .base import Body, Neutral

__all__ = ["Logprobs", "SamplingBody", "StreamOptions"]

INT64 = 2**63
Count = Annotated[int, Field(ge=1, le=INT64 - 1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
BIASES = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": r"^[0-9]{1,19}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
TokenId = Annotated[int, Field(ge=0, le=INT64 - 1)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, float]:
    """`{"50256": -100}` with its keys, which JSON has as strings, as token ids."""
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries: at most {MAX_BIASES} are allowed")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise ValueError(f"has the key {shorten(key)}, which is no token id")
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not is_number or not -100 <= bias <= 100:
            raise ValueError(f"has {shorten(bias)} for {key}: must be a number from -100 to 100")
        if int(key) in biases:
            raise ValueError(f"has the token id {int(key)} twice")
        biases[int(key)] = float(bias)
    return biases


class StreamOptions(Body):
    """What a stream carries besides the text."""

    neutral = {"include_obfuscation": Neutral("padding of the stream's chunks", (False,))}

    include_usage: bool = False
    """End the stream with a chunk that has no choices but the whole `usage`."""
    continuous_usage_stats: bool = False
    """Put the `usage` so far into every chunk."""


class SamplingBody(Body):
    """Sampling, length, stopping, streaming and scheduling of one request.

    Where no default is given, the model's `generation_config.json` has it, then OpenAI's.
    """

    model: str | None = None
    """The model's served name; left out, it is the one that is served."""

    # -- sampling
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 and anything below 1e-5 always takes the most likely token. Default: the model's,
    else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the fewest most likely tokens whose probabilities reach this. Default: the model's,
    else 1."""
    top_k: Annotated[int, Field(ge=-1, le=INT64 - 1)] | None = None
    """Keep this many most likely tokens; -1 and 0 keep all. Default: the model's, else 0."""
    min_p: Probability | None = None
    """Keep tokens at least this likely relative to the most likely one. Default: the model's,
    else 0."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of each token generated so far."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for each time it was generated so far."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides (multiplies, if negative) the logits of tokens in prompt and output. Default: the
    model's, else 1."""
    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1)] | None = None
    """The same request with the same seed samples the same tokens. Default: a new one."""
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases), WithJsonSchema(BIASES)] = {}
    """Added to the logits of these tokens, of up to 1024; keys are token ids."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Choices to generate for each prompt; the server may have a lower limit."""
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Must equal `n`: candidates are not ranked."""

    # -- length and stopping
    max_tokens: Count | None = None
    """Most tokens to generate; cut to what fits into the context. Default: the model's, else
    for a chat what is left of the context, for a plain prompt 16."""
    max_completion_tokens: Count | None = None
    """Another name for `max_tokens`; if both are given, they must be equal."""
    min_tokens: Annotated[int, Field(ge=0, le=INT64 - 1)] = 0
    """No end-of-text or stop token before this many; at most `max_tokens`."""
    stop: Annotated[
        StopStrings,
        BeforeValidator(_listed, json_schema_input_type=StopString | StopStrings),
    ] = []
    """A string of up to 1024 characters that ends the text, or up to 16 of them; not part of the
    text."""
    stop_token_ids: StopIds = []
    """Token ids, up to 128, that end the text besides the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    prompt_logprobs: Logprobs | None = None
    """Return log-probabilities of the prompt's tokens and of this many most likely ones."""

    # -- the answer's form and order
    stream: bool = False
    """Send the text as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower values go first, equal ones by arrival unless the server's `--schedule-policy` says
    otherwise."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only requests with the same salt share cached prefixes."""

    # -- accepted from OpenAI's clients
    user: str | None = None
    """Accepted; has no effect."""
    store: bool | None = None
    """Accepted; has no effect: nothing is stored."""
    metadata: dict[str, Any] | None = None
    """Accepted; has no effect."""
    service_tier: str | None = None
    """Accepted; has no effect."""
    safety_identifier: str | None = None
    """Accepted; has no effect."""
    prompt_cache_key: str | None = None
    """Accepted; has no effect: prefixes are cached without it."""

    @model_validator(mode="after")
    def _agrees(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream = true", "stream_options")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequestError(
                f"best_of = {self.best_of} must equal n = {self.n}: candidates are not ranked",
                "best_of",
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens = {both[0]} and max_completion_tokens = {both[1]} differ: give one",
                "max_completion_tokens",
            )
        return self

    def check_n(self, max_n: int) -> None:
        """Raise `InvalidRequestError` if more choices are asked for than the server allows."""
        if self.n > max_n:
            raise InvalidRequestError(
                f"n = {self.n} must be at most {max_n}, this server's --max-n", "n"
            )

    def to_params(self) -> SamplingParams:
        """The engine's parameters; what was left out is None if the model has its default.

        Raises `InvalidRequestError` for values that exclude each other.
        """
        values = {name: getattr(self, name) for name in _AS_GIVEN}
        limit = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        return SamplingParams(**{**values, "max_tokens": limit, **self._logprobs()})

    def _logprobs(self) -> dict[str, Any]:
        """How many log-probabilities are asked for, by the names of `SamplingParams`."""
        return {"prompt_logprobs": self.prompt_logprobs}


_AS_GIVEN = [name for name in SamplingParams.names() if name in SamplingBody.model_fields]
