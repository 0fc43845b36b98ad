"""Temporary arrays of a thread, in memory that it uses again.

A large array that is allocated and freed each time costs more in page faults than in arithmetic.
"""

import threading
from math import prod
from typing import Any

import numpy as np

from oocgemm.planning.tiling import Range
from oocgemm.stores.arrays import viewed
from oocgemm.stores.base import Array, Matrix

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


def read_block(purpose: str, matrix: Matrix, rows: Range, cols: Range) -> Array:
    """Return a block of a matrix, which must not be changed.

    It is a view of a plain array in memory. Other matrices are read into memory that the thread uses again
    for the next block for this purpose.
    """
    block = viewed(matrix, rows, cols)
    if block is None:
        block = scratch_array(purpose, (rows[1] - rows[0], cols[1] - cols[0]), matrix.dtype)
        matrix.read(rows, cols, block)
    return block
