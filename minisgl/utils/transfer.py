"""Small arrays between host and device, without stopping either.

The engine launches a step while the one before is still computed, so nothing on the way to a
launch may wait for the device, and reading a step's result may wait for that step only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["HostCopy", "to_device"]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on the CPU the two share memory.

    `torch.tensor(values, device=cuda)` would wait until the device has done all it was given.
    This copy is only queued. The array may change or go at once all the same: its memory is
    pageable, which the driver has read when the call returns. For large arrays that means
    waiting (on an H200, 512 KB were queued at once, and 8 MB waited for).
    """
    return torch.from_numpy(array).to(device, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """Tensors of one device on their way to the host.

    `tensor.tolist()` waits for all that the device was given up to that call, the steps launched
    after the one that made the tensor too. These copies wait for what makes the tensors, and `wait`
    waits for them alone; they have a stream of their own, as starting a copy takes longer than a
    small kernel, and the next step need not wait for it. A copy runs beside the host only into
    pinned memory; torch caches it, and gives a buffer to someone else only when it was dropped here
    and the copy into it is done. On the CPU the tensors are there already, and must not change
    until read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Without tensors, `wait` still waits for what `device` was given up to now."""
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if device.type == "cuda":
            self._tensors = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            stream = _copy_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in zip(self._tensors, tensors, strict=True):
                    target.copy_(source, non_blocking=True)
                    source.record_stream(stream)  # its memory is nobody else's before that
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, in the order given."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
