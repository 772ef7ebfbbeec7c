"""How the server behaves towards its clients; the engine's own options are `EngineConfig`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.errors import ConfigError
from minisgl.params import MAX_N
from minisgl.utils.flags import option

__all__ = ["API_KEY_VARIABLE", "ServerConfig"]

API_KEY_VARIABLE = "MINISGL_API_KEY"
"""Environment variable that holds the key, for the server and its clients."""

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")


@dataclass(frozen=True)
class ServerConfig:
    """Options of `minisgl serve`; flags are made from the fields."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(1919, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(
        None, "the name clients use for the model (default: the --model that was given)"
    )
    api_key: str | None = option(
        None, "key that clients must send (default: MINISGL_API_KEY, else none)"
    )
    tokenizer_workers: int = option(
        0, "processes that tokenize and detokenize; 0 uses threads, right for small machines"
    )
    max_queued_requests: int = option(
        1024, "sequences that may wait beyond those that may run; more get a 503"
    )
    max_body_size: int = option(16 << 20, "largest request body in bytes")
    max_n: int = option(MAX_N, "most sequences that one request may ask for")
    shutdown_timeout: float = option(
        30.0, "seconds that live requests may take to finish after SIGTERM; then they are aborted"
    )
    template_timeout: float = option(
        2.0, "seconds of CPU time that a chat template may take before it is stopped"
    )
    template_kwargs: Sequence[str] = option(
        TEMPLATE_KWARGS,
        "name that clients may set in chat_template_kwargs "
        f"(default: {', '.join(TEMPLATE_KWARGS)})",
    )
    reasoning_parser: str = option(
        "auto",
        "split the text between <think> and </think> off a chat's answers, as reasoning_content; "
        "auto: if the chat template mentions <think> or enable_thinking",
        choices=("auto", "think", "off"),
    )
    log_interval: float = option(
        5.0, "seconds between the log lines about a busy engine; 0 for none"
    )
    log_requests: bool = option(False, "log a line for each request")
    log_format: str = option("text", "form of log lines", choices=("text", "json"))
    trace_file: str | None = option(
        None,
        "write a Chrome trace of steps, on host and device, and requests (open it in Perfetto)",
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("tokenizer_workers", 0, 64),
            ("max_queued_requests", 0, 1 << 20),
            ("max_body_size", 1, 1 << 32),
            ("max_n", 1, MAX_N),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{_flag(name)} = {value!r} must be from {low} to {high}")
        for name, least in (
            ("shutdown_timeout", 0.0),
            ("template_timeout", 0.05),
            ("log_interval", 0.0),
        ):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or not least <= seconds <= 86_400:
                raise ConfigError(f"{_flag(name)} = {seconds!r} must be from {least:g} to 86400")
        for name, choices in (
            ("reasoning_parser", ("auto", "think", "off")),
            ("log_format", ("text", "json")),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{_flag(name)} = {value!r}: choose from {', '.join(choices)}")
        if self.api_key is not None and (not self.api_key or not self.api_key.isprintable()):
            raise ConfigError("--api-key must not be empty or hold control characters")
        if self.served_model_name is not None and not self.served_model_name:
            raise ConfigError("--served-model-name must not be empty")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
