"""Every error minisgl raises on purpose.

    MinisglError
    ├── InvalidRequestError    (ValueError)     one request's prompt or parameter; others go on
    │   └── ChatTemplateError                   the template refused or failed on the messages
    ├── ConfigError            (ValueError)     a flag, or a size that this machine can't hold
    ├── ModelError
    │   ├── ModelNotFoundError (FileNotFoundError)  no such folder, file, or hub id
    │   ├── UnsupportedModelError (ValueError)  unknown architecture, activation, RoPE type, ...
    │   └── CheckpointError    (RuntimeError)   weights missing, left over, misshapen, unreadable
    └── ServingError           (RuntimeError)   a request that was fine and could not be served
        ├── BusyError                           the queue is full, or the server starts or stops
        ├── RequestFailedError                  its step failed; the engine goes on
        └── EngineDeadError                     a process of the engine died; all requests end

Each message says what is wrong, which value it was, and what to change. The command line
prints it as one line and exits with code 2; the built-in base class beside each name lets
users catch it without importing this module.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "InvalidRequestError",
    "MinisglError",
    "ModelError",
    "ModelNotFoundError",
    "RequestFailedError",
    "ServingError",
    "UnsupportedModelError",
]


class MinisglError(Exception):
    """Base of every error that minisgl raises on purpose."""


class InvalidRequestError(MinisglError, ValueError):
    """A prompt or a sampling parameter that can't be served.

    `param` names the offending parameter (for example `"top_p"`), or is None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or its template refused the messages."""


class ConfigError(MinisglError, ValueError):
    """A configuration value that is wrong, or that this machine can't honour."""


class ModelError(MinisglError):
    """Base of what can be wrong with a model on disk."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The model named is not a folder, a GGUF file, or a hub id that could be fetched."""


class UnsupportedModelError(ModelError, ValueError):
    """The model asks for something minisgl does not implement."""


class CheckpointError(ModelError, RuntimeError):
    """The weights do not fit the model, or their files can't be read."""


class ServingError(MinisglError, RuntimeError):
    """Base of what keeps a valid request from being served."""


class BusyError(ServingError):
    """Not now: the queue is full, or the engine is loading or shutting down. Try again later."""


class RequestFailedError(ServingError):
    """The step that computed this request failed; others go on."""


class EngineDeadError(ServingError):
    """A process of the engine died. No request can be served any more."""
