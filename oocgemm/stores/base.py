"""Define the interfaces `Matrix`, whose blocks are read and written, and `Store`, which opens matrices.

`Retries` repeats reads after a transient error.

`ReadOnly` is the base of matrices that are only read. `View` is the base of views of another matrix.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import DTYPES, MULTIPLIED, GemmProblem, Layout
from oocgemm.planning.partition import Slicing
from oocgemm.planning.tiling import Range, length
from oocgemm.stores.folding import Folding, not_a_matrix
from oocgemm.values import dataclass

Array = NDArray[Any]

# Error numbers of failed reads that are worth a retry: the same read may succeed a moment later.
_TRANSIENT = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ESTALE),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
}
# Smaller chunks are read or written together: one call to zarr, or one slice of a lazy array, has about this
# many bytes. A call takes a fraction of a millisecond, which is too long for one small chunk.
BATCH_BYTES = 1 << 20


class RemoteFolder(Protocol):
    """The folder of a journal in a remote store. `oocgemm.stores.objects` implements it."""

    def __truediv__(self, name: str) -> "RemoteFolder":
        """Return the folder `name` in this one."""

    @property
    def name(self) -> str:
        """The last part of the path."""

    def get(self, name: str) -> tuple[bytes, dict[str, str]] | None:
        """Return the content and the version of an object in this folder; None if there is none."""

    def replace(self, name: str, content: bytes, version: dict[str, str] | None) -> dict[str, str]:
        """Replace a version of an object in this folder, or with None create it. Return the new version.

        Raises `ChangedError` if another process has changed or created the object.
        """

    def exists(self) -> bool:
        """Return whether the folder contains any object."""

    def array_exists(self) -> bool:
        """Return whether the array that contains this folder has any other object."""

    def clear(self, keep: Collection[str] = (), *, array: bool) -> None:
        """Delete the objects in this folder, and with `array` all of the array, except those in `keep`."""


Folder = Path | RemoteFolder


class ChangedError(ExecutionError, OSError):
    """Raised for a conditional write that failed because another process has changed the object."""


class Matrix(Protocol):
    """An operand or result: a two-dimensional array in memory, in files or in a remote store.

    Methods take a block of the array as half-open ranges of rows and columns. These are rows and columns of
    the stored array, before op(), the transposition that a product may apply.
    """

    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Read the block at these rows and columns into `out`, an array of its shape and the matrix's dtype.

        Several threads may call this method at once.
        """

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Write `data` to the block at these rows and columns.

        Several threads may call this method at once, if no two of them write to the same chunk. Chunks have
        the shape `layout.writing.chunk`.
        """

    def fingerprint(self) -> dict[str, object] | None:
        """Return values that change when the path, the metadata or the content of the matrix changes.

        Return None if changes cannot be detected, as for a matrix in memory. A resumed run compares the
        values with those of the interrupted run.
        """

    def describe(self) -> dict[str, object]:
        """Return store, path, shape, dtype and other facts, which are written to the log of a run."""

    def identities(self) -> set[object]:
        """Return ids of the files or stores that contain the data.

        Two matrices with a common id may share data, so a run may not write to one and read the other.
        """


class InProcess:
    """Base of matrices that only this process uses. A subclass adds the other members of `Matrix`."""

    name: str
    kind = "memory"  # the name of the store in the log
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: Layout

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return described(self, self.kind)

    def identities(self) -> set[object]:
        return set()


class ReadOnly(InProcess):
    """A matrix that no run writes."""

    what: str  # what the matrix is, for the error message of `write`

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Raise `ExecutionError`: the matrix cannot be written."""
        raise ExecutionError(f"{self.name} is {self.what}, which is read-only")


def described(matrix: InProcess | Matrix, store: str, path: str | None = None) -> dict[str, object]:
    """Return the facts that `Matrix.describe` states of every matrix."""
    return {"store": store, "path": path, "shape": list(matrix.shape), "dtype": dtype_name(matrix.dtype)}


def file_identities(path: str | Path) -> set[object]:
    """Return `identities` of a matrix in one file; an empty set if the file was deleted or renamed."""
    try:
        status = os.stat(path)
    except OSError:
        return set()
    return {("file", status.st_dev, status.st_ino)}


@dataclass(frozen=True)
class NewArray:
    """A result that is to be created.

    Attributes:
        name: name of the result in messages.
        path: path or URL of the result.
        shape, dtype: shape and dtype of the result.
        chunks: shape of the chunks, if the store has chunks.
        compressor: compressor of the chunks; None or "none" for no compression.
    """

    name: str
    path: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    chunks: tuple[int, int]
    compressor: str | None = None


class Store(ABC):
    """The code that opens and creates the matrices of one format, such as .npy files or zarr arrays.

    An operand may be any Python object: a path or URL (a string), an array, or another package's object. A
    subclass that overrides only the abstract methods is read-only. `oocgemm.stores.opening` explains how a
    package adds a store.
    """

    kind = "another store"  # the name of the format in messages
    has_genotypes = False  # whether its matrices are `oocgemm.stores.capabilities.Genotypes`
    has_chunks = True  # whether a result has chunks, which may be compressed
    default_uplo = "full"  # the triangle of a Gram matrix that a new result stores, if none is given
    has_own_rates = False  # whether its rates are not those of a file system

    @abstractmethod
    def matches(self, operand: Any) -> bool:
        """Return whether this store opens an operand. An implementation must be fast and must not raise."""

    @abstractmethod
    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        """Open an operand, or with `writable` an existing result. `name` is its name in messages.

        If an interrupted run created the result, `journal` is the folder that was passed to `create`. Raises
        `DtypeError` for an unsupported dtype, and `InputError` for any other problem.
        """

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        """Open an operand of any number of dimensions as a matrix (`stores.folding`). Raises as `open`.

        The operands of a store that does not override this method are matrices: only their own rows and
        columns can be asked for.
        """
        matrix = self.open(name, operand)
        fold = folding.fold(name, matrix.shape)
        if fold != Folding().fold(name, matrix.shape):
            raise InputError(
                f"{name} is {self.kind}, which is a matrix: drop rows, cols and isel (--rows, ...)"
            )
        return matrix

    def prepare(self, operand: Any) -> None:  # noqa: B027  # most stores need nothing
        """Import the packages that an operand needs, so that the time of a run excludes the imports."""

    def exists(self, path: str) -> bool:
        """Return whether the creation of a result at `path` would overwrite something."""
        return False

    def check_dtype(self, name: str, path: str, dtype: str) -> None:  # noqa: B027  # most store all
        """Raise `InputError` if a result at `path` cannot have a dtype. `name` is its name in messages."""

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Return the layout (the chunks and the memory to read and write them) of a new result at `path`.

        If `chunks` is None and the store has chunks, the planner chooses their shape. Raises `InputError` for
        `chunks` or a `compressor` that the store does not support.
        """
        raise self._read_only(path)

    def create(self, new: NewArray, journal: Path | None = None) -> Matrix:
        """Create a result. A store may keep it in the folder `journal` until the run is complete.

        Raises `InputError` if the result cannot be created, or if the disk is too full for it.
        """
        raise self._read_only(new.path)

    def journal_folder(self, operand: Any) -> Folder | None:
        """Return the folder for the journal (the record of finished tiles) of a run with this result.

        None means that such a run cannot be resumed.
        """
        return None

    def split(self, path: str) -> tuple[str, str] | None:
        """Split the address of an array in a file into the path of the file and the rest; None for a path.

        An implementation must not open the file: nobody has checked that it may be read.
        """
        return None

    def companions(self, path: str) -> list[Path]:
        """Return further files that are read when the array at a path is opened."""
        return []

    def location(self, operand: Any) -> tuple[str, str | None]:
        """Return the kind of store and the path of an operand, for messages."""
        return self.kind, operand if is_path(operand) else None

    def _read_only(self, path: str) -> InputError:
        return InputError(f"C at {path}: {self.kind} is read-only; give a path that ends in .zarr or .npy")


class Composite(ABC):
    """An operand that describes a matrix by other operands."""

    @abstractmethod
    def open(self, name: str) -> "Matrix":
        """Open the operands, and return the matrix that they make. Raises `InputError`."""

    @abstractmethod
    def mapped(self, change: Callable[[Any], Any]) -> Self:
        """Return the same description of changed operands."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, which is opened for it."""
        return self.open("the matrix").shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the matrix, which is opened for it."""
        return self.open("the matrix").dtype


def mapped(operand: Any, change: Callable[[Any], Any]) -> Any:
    """Return an operand in which each path, array or other object that it consists of is changed."""
    if isinstance(operand, Composite):
        return operand.mapped(lambda part: mapped(part, change))
    return change(operand)


def leaves(operand: Any) -> list[Any]:
    """Return the paths, arrays and other objects of which an operand consists."""
    found: list[Any] = []
    mapped(operand, found.append)
    return found


def is_path(value: object) -> bool:
    """Return whether a value is a path or URL rather than an array."""
    return isinstance(value, str | os.PathLike)


@lru_cache(64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype from a cache: NumPy takes a microsecond to derive the name."""
    return str(dtype.name)


def named_dtype(given: Any) -> str:
    """Return the name of a dtype that a caller has passed. Return an unknown dtype as text."""
    try:
        return str(np.dtype(given).name)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses any text with commas as a list of dtypes
        return str(given)


def package(source: object) -> str:
    """Return the name of the package that defines an object's type."""
    return type(source).__module__.partition(".")[0]


def not_writable(name: str) -> InputError:
    return InputError(f"{name} cannot be written to: pass a writable ndarray, a zarr array or a path")


def refuse_zarr_options(kind: str, chunks: tuple[int, int] | None, compressor: str | None) -> None:
    """Raise `InputError` if chunks or a compressor are given for a result that is not a zarr array."""
    if chunks or compressor not in (None, "none"):
        raise InputError(
            f"C would be {kind}, but chunks and compressor are for zarr arrays: drop them, or give C a path "
            "that ends in .zarr"
        )


def transient(error: BaseException) -> bool:
    """Return whether an error of a read is temporary, so that a retry may succeed."""
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    # Each client of a remote store has its own exception class for a lost connection.
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    return any(word in names for word in ("Connect", "Disconnect", "Timeout"))


class DtypeError(InputError):
    """Raised for an operand whose dtype cannot be multiplied.

    `dtype` is the dtype. `declared` is the operand's declaration about its elements (`stores.declared`).
    """

    def __init__(self, name: str, dtype: np.dtype[Any], declared: Any = None) -> None:
        super().__init__(f"{name} is of dtype {dtype}, supported are {', '.join(MULTIPLIED)}")
        self.dtype, self.declared = dtype, declared


def checked(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    declared: Any = None,
    names: Sequence[str | None] | None = None,
) -> tuple[tuple[int, int], np.dtype[Any]]:
    """Return the shape of an operand, and its dtype in native byte order.

    `names` are the names of its axes. Raises `InputError` if the operand is not a matrix, and `DtypeError` if
    its dtype is not supported.
    """
    if len(shape) < 2 and dtype.kind in "OSUmM":
        raise InputError(f"{name} is not an array of numbers: pass an array with two dimensions, or a path")
    if len(shape) != 2:
        raise InputError(not_a_matrix(name, shape, names))
    if min(shape) < 0:
        raise InputError(
            f"{name} has the shape {shape[0]} x {shape[1]}, with a negative extent: its metadata is damaged"
        )
    if shape[0] * shape[1] >= 2**60:
        raise InputError(f"{name} has the shape {shape[0]} x {shape[1]}: at most 2^60 elements are supported")
    if dtype_name(dtype) not in DTYPES:
        raise DtypeError(name, dtype, declared)
    return (int(shape[0]), int(shape[1])), dtype.newbyteorder("=")


def pieces(
    rows: Range, cols: Range, chunk: tuple[int, int], min_elements: int
) -> Iterator[tuple[Range, Range]]:
    """Cut a block along chunk borders into parts of whole chunks, of at least `min_elements` elements.

    Parts at the edges of the block may be smaller, and may contain only parts of chunks.

    >>> list(pieces((0, 4), (1, 7), (2, 3), 1))[:2]
    [((0, 2), (1, 3)), ((0, 2), (3, 6))]
    >>> list(pieces((0, 8), (0, 6), (2, 3), 20))
    [((0, 4), (0, 6)), ((4, 8), (0, 6))]
    """
    chunk_row = chunk[0] * max(1, cols[1] - cols[0])
    wide = -(-min_elements // (chunk[0] * chunk[1]))
    tall = max(1, -(-min_elements // chunk_row)) if chunk_row < min_elements else 1
    for r0, r1 in _cuts(rows, chunk[0], tall):
        for c0, c1 in _cuts(cols, chunk[1], max(1, wide)):
            yield (r0, r1), (c0, c1)


def _cuts(span: Range, chunk: int, chunks_each: int) -> Iterator[Range]:
    """Yield the parts of a range, each of `chunks_each` chunks. The first and the last may be smaller."""
    start, stop = span
    while start < stop:
        end = min(stop, (start // chunk + chunks_each) * chunk)
        yield start, end
        start = end


# Seconds to wait before each retry of a read that failed with a transient error. If the last retry fails,
# after 12 s in all, the read fails.
RETRY_AFTER = (0.1, 0.3, 0.9, 2.7, 8.1)


class ReadError(ExecutionError):
    """Raised for a block that cannot be read. The message names the store and the range."""


class Retries:
    """Read blocks of matrices. After a transient error, wait and read again.

    Attributes:
        made: a list with the error message of each failed read that was tried again.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self._stopped = Event()

    def read(self, matrix: Matrix, rows: Range, cols: Range, out: Array) -> None:
        """Read a block into `out`. Raises `ReadError` if the read fails and retries do not help."""
        for delay in (*RETRY_AFTER, None):
            try:
                matrix.read(rows, cols, out)
                return
            except Exception as error:
                failed = failure("reading", matrix, rows, cols, error)
                if delay is None or not transient(error) or self._stopped.wait(delay):
                    raise ReadError(failed) from error
                self.made.append(failed)

    def stop(self) -> None:
        """Stop retrying. A read that waits for its next try fails at once."""
        self._stopped.set()


def failure(verb: str, matrix: Matrix, rows: Range, cols: Range, error: Exception) -> str:
    """Return the message of an error, preceded by the store and the range of the matrix."""
    what = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
    return f"{verb} {matrix.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}]: {what}"


class View(ReadOnly):
    """A read-only view of a matrix. Subclasses define `shape`, `layout` and `read`."""

    what = "a view"

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.name = matrix.name
        self.dtype = matrix.dtype

    def fingerprint(self) -> dict[str, object] | None:
        return self._matrix.fingerprint()

    def describe(self) -> dict[str, object]:
        return self._matrix.describe()

    def identities(self) -> set[object]:
        return self._matrix.identities()

    @property
    def viewed(self) -> Matrix:
        """The matrix that the view reads."""
        return self._matrix


def underlying(matrix: Matrix) -> Matrix:
    """Return the matrix that a view, or a view of a view, reads. Return any other matrix unchanged."""
    while isinstance(matrix, View):
        matrix = matrix.viewed
    return matrix


class RowsMatrix(View):
    """A read-only view of some successive rows of a matrix. The first row is the first of a chunk."""

    def __init__(self, matrix: Matrix, rows: Range) -> None:
        super().__init__(matrix)
        self._top = rows[0]
        self.shape = length(rows), matrix.shape[1]
        self.layout: Layout = matrix.layout.copied()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        self._matrix.read((self._top + rows[0], self._top + rows[1]), cols, out)


class MirroredMatrix(View):
    """A read-only view of a square matrix that mirrors one triangle at the diagonal."""

    def __init__(self, matrix: Matrix, *, upper: bool) -> None:
        """View a matrix that stores only its lower triangle, or with `upper` only its upper triangle."""
        super().__init__(matrix)
        self._upper = upper
        self.shape = matrix.shape
        self.layout: Layout = matrix.layout

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        below, above = rows[0] >= cols[1] - 1, rows[1] - 1 <= cols[0]
        if above if self._upper else below:
            self._matrix.read(rows, cols, out)
            return
        turned = np.empty((cols[1] - cols[0], rows[1] - rows[0]), self.dtype)
        self._matrix.read(cols, rows, turned)
        mirrored = turned.T.conj() if self.dtype.kind == "c" else turned.T
        if below if self._upper else above:
            out[...] = mirrored
            return
        self._matrix.read(rows, cols, out)
        place = np.subtract.outer(np.arange(*rows), np.arange(*cols))
        np.copyto(out, mirrored, where=place > 0 if self._upper else place < 0)


class ConstantRows(ReadOnly):
    """A matrix of `count` equal rows. It is never stored."""

    what, kind = "a matrix of equal rows", "equal rows"

    def __init__(self, name: str, row: Array, count: int, resident_bytes: int = 0) -> None:
        """Repeat the vector `row`. `resident_bytes` is the memory that the caller holds for the matrix."""
        self.name, self._row = name, row
        self.shape = count, len(row)
        self.dtype: np.dtype[Any] = row.dtype
        self.layout = Layout(itemsize=row.itemsize, resident_bytes=resident_bytes)

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        out[...] = self._row[slice(*cols)]


class SlicedMatrix(View):
    """A view of A or B for the product of stacked slices. Elements outside the matrix are zeros.

    A slice is a range along k. Row q * rows + i of the stacked op(A) is row i of slice number q of op(A). The
    view of B contains the rows of op(B) in one slice, `Slicing.number`.
    """

    def __init__(self, matrix: Matrix, slicing: Slicing, *, transposed: bool) -> None:
        """View A or B. `transposed` tells whether op() exchanges the rows and columns of the matrix."""
        super().__init__(matrix)
        self._slicing = slicing
        self._k_axis = int((matrix.name == "A") != transposed)
        other = matrix.shape[1 - self._k_axis]
        self._stacks = matrix.name == "A"
        if self._stacks:
            other = slicing.rows * len(slicing.ranges)
        self.shape = (slicing.depth, other) if self._k_axis == 0 else (other, slicing.depth)
        self.layout: Layout = matrix.layout.copied()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        block = rows, cols
        along_k, other = block[self._k_axis], block[1 - self._k_axis]
        if not self._stacks:
            assert self._slicing.number is not None
            self._read_slice(self._slicing.number, along_k, other, out)
            return
        height = self._slicing.rows
        for number in range(other[0] // height, -(-other[1] // height)):
            top = number * height
            start, stop = max(other[0], top), min(other[1], top + height)
            part = slice(start - other[0], stop - other[0])
            target = out[:, part] if self._k_axis == 0 else out[part]
            self._read_slice(number, along_k, (start - top, stop - top), target)

    def _read_slice(self, number: int, along_k: Range, other: Range, out: Array) -> None:
        """Read a block of one slice. `other` is a range along the axis of the matrix that is not k."""
        first, end = self._slicing.ranges[number]
        inside = [
            (min(along_k[0] + first, end), min(along_k[1] + first, end)),
            (other[0], min(other[1], self._matrix.shape[1 - self._k_axis])),
        ]
        if self._k_axis == 1:
            inside.reverse()
        rows, cols = inside
        height, width = max(0, length(rows)), max(0, length(cols))
        out[height:] = 0
        out[:height, width:] = 0
        if height and width:
            self._matrix.read(rows, cols, out[:height, :width])
