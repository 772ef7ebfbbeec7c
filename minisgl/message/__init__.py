"""What the processes of a server say to each other: typed messages, encoded as MessagePack.

                 Encode, Submit, Abort                    Submit, Abort, Flush
    AsyncEngine ----------------------> text workers ------------------------> scheduler
         ^                                |       ^                              |
         +------ Encoded, Deltas, Status -+       +------- StepDone, Flushed ----+

With no text workers, the engine's own threads do their work and the arrows end there.
Owns: the message types (`messages.py`). Does not own: sockets (`utils/mp.py`).
Invariant: a message decodes to the type it was sent as or raises; nothing is ever unpickled.
Read next: `messages.py`.
"""

from __future__ import annotations

from .messages import (
    Abort,
    Answer,
    Decode,
    Deltas,
    Encode,
    EncodeChat,
    EngineReady,
    EngineStats,
    Flush,
    Flushed,
    FromScheduler,
    Refusal,
    RequestStart,
    SequenceDelta,
    StartFailed,
    StepDone,
    StepTrace,
    Submit,
    TextReady,
    ToFront,
    TokenUpdate,
    ToScheduler,
    ToTextWorker,
    make_reqs,
)

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
