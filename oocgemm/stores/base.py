"""What a store is: a matrix of which any block can be read into a slot, or written from one."""

import errno
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.planning import DTYPES, OPERANDS, Layout
from oocgemm.planning.tiling import Span

Array = NDArray[Any]

# What a disk or a server may get over; anything else comes back however often one tries.
_TRANSIENT = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
}
# Smaller chunks are read and written several at a time: each call to zarr costs a fraction of a millisecond.
BATCH_BYTES = 1 << 20


class Matrix(Protocol):
    """A two-dimensional array, as it is stored (op() is not applied here)."""

    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout

    def read(self, rows: Span, cols: Span, out: Array) -> None:
        """Fill `out` (of the block's shape and this matrix's dtype) with the block. Threads may call it side
        by side."""

    def write(self, rows: Span, cols: Span, data: Array) -> None:
        """Store `data` as the block. Threads may call it side by side for blocks that share no write chunk."""

    def sync(self) -> None:
        """Have the system bring all that was written to the disk, as far as it has one. Raises `OSError`."""

    def set_finished(self, finished: bool) -> None:
        """Have it say of itself, durably, that it is the result of a run that has not ended, or that it is not; as far
        as there is a place to say it."""

    def fingerprint(self) -> dict[str, object] | None:
        """Where it is, what it is, and what stands for its content, to tell later whether it is still the same; None
        for memory."""

    def describe(self) -> dict[str, object]:
        """What it is, for the header of a timeline."""

    def identities(self) -> set[object]:
        """What it occupies: two matrices that share an identity may share memory or files."""


def transient(error: BaseException) -> bool:
    """Whether reading may well succeed if tried again.

    Clients of remote stores have classes of their own for a connection that broke; they name them alike.
    """
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    return any(word in names for word in ("Connect", "Disconnect", "Timeout"))


class DtypeError(InputError):
    """An operand of a dtype that cannot be multiplied."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(f"{name} is of dtype {dtype}, supported are {', '.join(OPERANDS)}")
        self.dtype = dtype


def checked(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, int], np.dtype[Any]]:
    """Return the shape and native dtype of an operand that can be multiplied.

    Raises `InputError` for any other, `DtypeError` because of its dtype.
    """
    if len(shape) != 2:
        hint = "multiply its matrices one by one" if len(shape) > 2 else "reshape it to (1, n) or (n, 1)"
        raise InputError(f"{name} has {len(shape)} dimensions, a product needs 2: {hint}")
    if shape[0] * shape[1] >= 2**60:
        raise InputError(f"{name} says that it is {shape[0]} x {shape[1]}, more than any machine can address")
    if dtype.name not in DTYPES:
        raise DtypeError(name, dtype)
    return (int(shape[0]), int(shape[1])), dtype.newbyteorder("=")


def pieces(rows: Span, cols: Span, chunk: tuple[int, int], least: int) -> Iterator[tuple[Span, Span]]:
    """Cut a block along chunk borders into parts of at least `least` elements, where there are as many.

    >>> list(pieces((0, 4), (1, 7), (2, 3), 1))[:2]
    [((0, 2), (1, 3)), ((0, 2), (3, 6))]
    >>> list(pieces((0, 8), (0, 6), (2, 3), 20))
    [((0, 4), (0, 6)), ((4, 8), (0, 6))]
    """
    chunk_row = chunk[0] * max(1, cols[1] - cols[0])
    wide = -(-least // (chunk[0] * chunk[1]))
    tall = max(1, -(-least // chunk_row)) if chunk_row < least else 1
    for r0, r1 in _cuts(rows, chunk[0], tall):
        for c0, c1 in _cuts(cols, chunk[1], max(1, wide)):
            yield (r0, r1), (c0, c1)


def _cuts(span: Span, chunk: int, chunks_each: int) -> Iterator[Span]:
    start, stop = span
    while start < stop:
        end = min(stop, (start // chunk + chunks_each) * chunk)
        yield start, end
        start = end
