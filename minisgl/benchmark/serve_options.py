"""What `minisgl bench serve` is asked to do; flags are made from the fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from minisgl.errors import ConfigError
from minisgl.utils.flags import option

__all__ = ["GOODPUT_KEYS", "Range", "ServeOptions", "parse_goodput"]

GOODPUT_KEYS = ("ttft", "tpot", "e2e")


class Range(NamedTuple):
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str, least: int) -> Range:
        """The range that `text` ("64" or "32:256") gives for a flag."""
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text, re.ASCII)
        if not found:
            raise ConfigError(f"{flag} = {text!r} must be a number or a range, as in 32:256")
        low = int(found[1])
        high = int(found[2] or low)
        if not least <= low <= high:
            raise ConfigError(f"{flag} = {text!r} must be at least {least}, and LOW at most HIGH")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class ServeOptions:
    """Options of `minisgl bench serve`. Wrong values raise `ConfigError` at once."""

    url: str = option("http://127.0.0.1:1919", "address of the server")
    model: str | None = option(None, "model to ask for (default: the first of /v1/models)")
    api_key: str | None = option(None, "key to send (default: MINISGL_API_KEY, else none)")
    endpoint: str = option(
        "completions",
        "completions sends token ids; chat sends words, about one token each",
        choices=("completions", "chat"),
    )
    num_requests: int | None = option(None, "requests to measure (default: 200, or all of FILE)")
    request_rate: float = option(
        math.inf, "requests a second, sent at random times (Poisson); inf sends all at once"
    )
    concurrency: int | None = option(
        None, "most requests in flight; a request that ends lets the next one go"
    )
    input_len: str | None = option(
        None, "tokens of a random prompt, or a range as in 32:256 (default: 256)"
    )
    output_len: str = option("128", "tokens to generate, or a range")
    shared_prefix_len: int = option(0, "random tokens that come first in all prompts")
    vocab: str | None = option(
        None, "token ids that random prompts are made of, for completions (default: 1000:4000)"
    )
    dataset: str | None = option(
        None,
        "JSON lines with `prompt` (text or ids), or `messages` for --endpoint chat, and "
        "`max_tokens` in place of --output-len; sent in order, other keys are not read",
    )
    ignore_eos: bool | None = option(
        None, "go on after an end-of-sequence token (default: yes, but no for --dataset)"
    )
    temperature: float = option(0.0, "of sampling; 0 is greedy")
    seed: int = option(0, "decides prompts, lengths and times of sending")
    warmup: int = option(4, "requests sent beforehand, not measured")
    timeout: float = option(600.0, "seconds after which a request has failed")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.url):
            raise ConfigError(f"--url = {self.url!r} must be like http://127.0.0.1:1919")
        for name, low in (("num_requests", 1), ("concurrency", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not low <= value <= 1 << 31:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} = {value} must be from {low} to {1 << 31}")
        if not 0 <= self.shared_prefix_len < 1 << 24:
            raise ConfigError(f"--shared-prefix-len = {self.shared_prefix_len} must be 0 or more")
        if not self.request_rate > 0:  # also refuses NaN
            raise ConfigError(f"--request-rate = {self.request_rate} must be above 0, or inf")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"--timeout = {self.timeout} must be above 0 and finite")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature = {self.temperature} must be 0 or more and finite")
        if self.dataset is not None and not Path(self.dataset).is_file():
            raise ConfigError(f"--dataset = {self.dataset!r} is no file")
        _ = self.input_range, self.output_range, self.vocab_range
        self._check_the_use_of_what_is_set()

    def _check_the_use_of_what_is_set(self) -> None:
        of_random = self.input_len, self.vocab, self.shared_prefix_len or None
        if self.dataset is not None and of_random != (None, None, None):
            raise ConfigError("--dataset has no use for --input-len, --vocab, --shared-prefix-len")
        if self.endpoint == "chat" and self.vocab is not None:
            raise ConfigError("--endpoint chat sends words: it has no use for --vocab")

    @property
    def base_url(self) -> str:
        """The address without the `/v1` that users of other clients are used to append."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def input_range(self) -> Range:
        text = "256" if self.input_len is None else self.input_len
        return Range.parse("--input-len", text, 1)

    @property
    def output_range(self) -> Range:
        return Range.parse("--output-len", self.output_len, 1)

    @property
    def vocab_range(self) -> Range:
        return Range.parse("--vocab", "1000:4000" if self.vocab is None else self.vocab, 0)

    @property
    def runs_past_eos(self) -> bool:
        """Whether requests ask to ignore EOS, so that their number of tokens is known."""
        return self.dataset is None if self.ignore_eos is None else self.ignore_eos


def parse_goodput(texts: Iterable[str]) -> Mapping[str, float]:
    """Limits in milliseconds from texts like "ttft:200"."""
    limits = {}
    for text in texts:
        name, _, number = text.partition(":")
        if name not in GOODPUT_KEYS or not re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII):
            raise ConfigError(
                f"--goodput = {text!r} must be a limit in milliseconds, as in ttft:200 "
                f"(for {', '.join(GOODPUT_KEYS)})"
            )
        limits[name] = float(number)
    return limits
