"""Temporary arrays of a thread, in memory that it uses again.

A large array that is allocated and freed each time costs more in page faults than in arithmetic.
"""

import threading
from math import prod
from typing import Any

import numpy as np

from oocgemm.stores.base import Array

_kept = threading.local()


def in_float64(block: Array) -> Array:
    """Return the elements of a block in float64, in an array that the thread uses again."""
    wide = scratch_array("float64", block.shape, np.dtype(np.float64))
    np.copyto(wide, block, casting="unsafe")
    return wide


def scratch_array(purpose: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array in memory that the thread uses again for the next array for this purpose.

    A read through several views needs a purpose for each of them.
    """
    size = prod(shape) * dtype.itemsize
    kept: Array | None = getattr(_kept, purpose, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.uint8)
        setattr(_kept, purpose, kept)
    return kept[:size].view(dtype).reshape(shape)
