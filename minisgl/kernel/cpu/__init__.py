"""Native CPU kernels: a decoder's whole forward as one call into C++.

Owns: the C++ sources (`csrc/`), their compilation and loading (`build.py`), the C structs
(`structs.py`) and weights in the kernels' layout (`pack.py`). Does not own: what a model is made
of (`models/native.py` describes it to the kernels), pages or requests.
Invariant: a row's result depends on nothing else in the batch, bit for bit; `csrc/gemm.h` and
`csrc/attention.h` say how.
Read next: `csrc/model.h`, which has the forward on one screen.
"""

from __future__ import annotations

from .build import has_native, library
from .pack import NATIVE_TYPES, PackedExperts, PackedWeight, linear_struct, pack_weight
from .pool import ThreadPool

__all__ = [
    "NATIVE_TYPES",
    "PackedExperts",
    "PackedWeight",
    "ThreadPool",
    "has_native",
    "library",
    "linear_struct",
    "pack_weight",
]
