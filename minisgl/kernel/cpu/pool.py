"""The threads of the native kernels."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from .build import library

__all__ = ["ThreadPool", "free_with"]


def free_with(owner: object, free: Any, handle: ctypes.c_void_p) -> None:
    """Call `free(handle)` when `owner` is collected, in the process that made it.

    Not at the process's end, when threads may still be inside a kernel and the system takes the
    memory anyway; and not in a fork, which has no worker threads to wait for.
    """
    made_in = os.getpid()

    def release() -> None:
        if os.getpid() == made_in:
            free(handle)

    weakref.finalize(owner, release).atexit = False


class ThreadPool:
    """`threads` of them, the caller's included; they sleep when there is no work for a while.

    `handle` is what the kernels take. Freed with the object.
    """

    def __init__(self, threads: int) -> None:
        native = library()
        native.minisgl_pool.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(native.minisgl_pool(ctypes.c_int(threads)))
        self.threads = threads
        free_with(self, native.minisgl_pool_free, self.handle)
