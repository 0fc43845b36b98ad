"""Define a matrix, whose blocks are read into slots and written from them, and a store of matrices."""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import InputError
from oocgemm.planning import DTYPES, OPERANDS, GemmProblem, Layout
from oocgemm.planning.tiling import Range

Array = NDArray[Any]

# Errors that a retry may overcome.
_TRANSIENT = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
}
# Smaller chunks are read and written in batches, since each call to zarr costs a fraction of a millisecond.
BATCH_BYTES = 1 << 20


class Matrix(Protocol):
    """A two-dimensional array in a store. Blocks are in stored orientation: op() is not applied here."""

    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Fill `out`, of the block's shape and this matrix's dtype, with the block.

        Several threads may call it at once.
        """

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Store `data` as the block.

        Several threads may call it at once for blocks that share no write chunk.
        """

    def sync(self) -> None:
        """Flush all written data to stable storage, where there is any. Raises `OSError`."""

    def set_finished(self, finished: bool) -> None:
        """Mark the matrix, durably, as the complete or incomplete result of a run.

        Stores without metadata do nothing.
        """

    def fingerprint(self) -> dict[str, object] | None:
        """Identify path, metadata and content, so that a later run can tell whether they changed.

        None for memory.
        """

    def describe(self) -> dict[str, object]:
        """Return store, path, shape, dtype and other facts for the header of a timeline."""

    def identities(self) -> set[object]:
        """Return ids of the files or stores that it occupies. Matrices with a common id may share data."""


class Store(ABC):
    """A kind of operand, and how to open and create it. See `oocgemm.stores.registry` for how to add one.

    An operand may be any Python object. A path or URL is a string. Unless it is an ndarray, a result
    that a run creates has a path. A store that overrides only the abstract methods is read-only.
    """

    kind = "another store"  # for messages

    @abstractmethod
    def matches(self, operand: Any) -> bool:
        """Return whether this store opens an operand. It must be fast, and must not raise."""

    @abstractmethod
    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        """Open an operand, or with `writable` an existing result.

        `journal` is the folder that `create` got, if the run did not complete the result. Raises
        `InputError`, which says what is wrong and what to do, and `DtypeError`.
        """

    def prepare(self, operand: Any) -> None:  # noqa: B027  # most stores need nothing
        """Import the packages that an operand needs, so that no run includes that time."""

    def exists(self, path: str) -> bool:
        """Return whether there is a result at a path."""
        return False

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Return the layout of a new result. Raises `InputError` for options that do not apply."""
        raise self._read_only(path)

    def create(
        self,
        name: str,
        path: str,
        shape: tuple[int, int],
        dtype: np.dtype[Any],
        chunks: tuple[int, int],
        compressor: str | None,
        *,
        journal: Path | None = None,
    ) -> Matrix:
        """Create a result, which may be kept in the folder `journal` until it is complete.

        Raises `InputError` if it cannot be created, or if the disk has no room for it.
        """
        raise self._read_only(path)

    def journal_folder(self, operand: Any) -> Path | None:
        """Return the folder for the journal of a run with this result; None if the run cannot be resumed."""
        return None

    def location(self, operand: Any) -> tuple[str, str | None]:
        """Return the kind of store and the path of an operand, for messages."""
        return self.kind, operand if is_path(operand) else None

    def _read_only(self, path: str) -> InputError:
        return InputError(f"C at {path}: {self.kind} is read-only, give a path that ends in .zarr or .npy")


def is_path(value: object) -> bool:
    """Return whether a value is a path or URL rather than an array."""
    return isinstance(value, str | os.PathLike)


def package(source: object) -> str:
    """Return the name of the package that defines an object's type."""
    return type(source).__module__.partition(".")[0]


def not_writable(name: str) -> InputError:
    """Return the error for a result that cannot be written to."""
    return InputError(f"{name} cannot be written to: pass a writable ndarray, a zarr array or a path")


def refuse_zarr_options(kind: str, chunks: tuple[int, int] | None, compressor: str | None) -> None:
    """Raise `InputError` if chunks or a compressor are given for a result that is not a zarr array."""
    if chunks or compressor not in (None, "none"):
        raise InputError(f"C is to be {kind}: chunks and compressor are for a zarr array, give C such a path")


def transient(error: BaseException) -> bool:
    """Return whether a failed read may succeed when it is retried.

    Clients of remote stores raise their own exception classes for a lost connection. They are recognized by
    name.
    """
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    return any(word in names for word in ("Connect", "Disconnect", "Timeout"))


class DtypeError(InputError):
    """The error for an operand whose dtype cannot be multiplied."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(f"{name} is of dtype {dtype}, supported are {', '.join(OPERANDS)}")
        self.dtype = dtype


def checked(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, int], np.dtype[Any]]:
    """Return the shape and native dtype of an operand that can be multiplied.

    Raises `InputError` for an unsupported shape and `DtypeError` for an unsupported dtype.
    """
    if len(shape) != 2:
        hint = "multiply its matrices one by one" if len(shape) > 2 else "reshape it to (1, n) or (n, 1)"
        raise InputError(f"{name} has {len(shape)} dimensions, a product needs 2: {hint}")
    if shape[0] * shape[1] >= 2**60:
        raise InputError(f"{name} has the shape {shape[0]} x {shape[1]}: at most 2^60 elements are supported")
    if dtype.name not in DTYPES:
        raise DtypeError(name, dtype)
    return (int(shape[0]), int(shape[1])), dtype.newbyteorder("=")


def pieces(rows: Range, cols: Range, chunk: tuple[int, int], least: int) -> Iterator[tuple[Range, Range]]:
    """Cut a block along chunk borders into parts of at least `least` elements, where it has as many.

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


def _cuts(span: Range, chunk: int, chunks_each: int) -> Iterator[Range]:
    start, stop = span
    while start < stop:
        end = min(stop, (start // chunk + chunks_each) * chunk)
        yield start, end
        start = end
