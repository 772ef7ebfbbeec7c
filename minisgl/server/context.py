"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from minisgl.errors import BusyError, EngineDeadError

from .config import ServerConfig
from .logprobs import TokenTexts

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .metrics import Metrics

__all__ = ["ServerContext", "ServerState"]


@dataclass
class ServerState:
    """Where the server is in its life: loading, ready, draining; or its engine is dead."""

    loading: bool = True
    draining: bool = False
    error: EngineDeadError | None = None
    num_requests: int = 0
    """HTTP requests whose head has come and whose answer has not been sent."""

    def require_ready(self) -> None:
        """Raise `BusyError` or `EngineDeadError` unless requests can be served now."""
        if self.error is not None:
            raise self.error
        if self.loading:
            raise BusyError("the model is still loading: try again in a few seconds")
        if self.draining:
            raise BusyError("the server is shutting down")


@dataclass(frozen=True)
class ServerContext:
    """The engine and what is said about it; made once for an app."""

    engine: AsyncEngine
    config: ServerConfig
    model_name: str
    """The name that clients use."""
    created: int
    """Unix time, in seconds, of the server's start."""
    state: ServerState
    metrics: Metrics

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of the model's tokens; the tokenizer is there once the engine has started."""
        return TokenTexts(self.engine.tokenizer)
