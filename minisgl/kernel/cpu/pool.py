"""The threads of the native kernels."""

from __future__ import annotations

import ctypes
import weakref

from .build import library

__all__ = ["ThreadPool"]


class ThreadPool:
    """`threads` of them, the caller's included; they sleep when there is no work for a while.

    `handle` is what the kernels take. Freed with the object.
    """

    def __init__(self, threads: int) -> None:
        native = library()
        native.minisgl_pool.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(native.minisgl_pool(ctypes.c_int(threads)))
        self.threads = threads
        weakref.finalize(self, native.minisgl_pool_free, self.handle)
