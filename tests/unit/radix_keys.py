"""Keys of the radix tree."""

from __future__ import annotations

import numpy as np


def key_of(tokens: list[int]) -> bytes:
    """Token ids as the tree takes them."""
    return np.array(tokens, dtype="<i4").tobytes()
