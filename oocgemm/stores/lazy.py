"""Read lazy operands: objects that read or compute a block when they are sliced.

Arrays of dask, h5py, xarray and tensorstore are lazy. A read copies its block piece by piece. A piece is one
chunk, a batch of small chunks, or part of an array without chunks.

`Layout.decode_bytes` counts the memory that slicing a piece allocates. The memory that the computation of a
dask array needs besides its chunks is unknown, and is not counted.
"""

import importlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate, islice
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Chunked, Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import (
    BATCH_BYTES,
    Array,
    Matrix,
    ReadOnly,
    Store,
    checked,
    is_path,
    not_writable,
    package,
    pieces,
)
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.declared import of_object
from oocgemm.stores.folding import Folding

# Packages whose arrays several threads may read at once. h5py locks its own calls.
CONCURRENT = ("dask", "h5py", "tensorstore", "xarray")
# A slice of a lazy array is assumed to take this many times its size in host memory, for three copies: the
# stored elements, the decoded elements, and the array that the package returns.
COPIES = 3
# For an array without chunks, the planner assumes chunks of one row and at most this many bytes, which are
# read whole. The planner then avoids panels with much shorter rows, which are slow to read.
ROW_BYTES = 16 << 10
# A message names the arrays that are among the first members of a collection, of which at most this many are
# checked.
MAX_LISTED = 8
# An object with one of these attributes has its elements in memory, so it is not lazy.
MEMORY = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")
# A thread takes this lock while it reads an array of a package that is not in CONCURRENT. The C libraries of
# such packages may not be safe for several threads.
_serial = threading.Lock()


class LazyArrays(Store):
    """Open lazy operands, read-only.

    This store also matches collections such as dict, and dask objects that are not arrays. It cannot open
    them, but the error that `open` raises says what to pass instead.
    """

    kind = "a lazy array"

    def matches(self, operand: Any) -> bool:
        if is_path(operand):
            return False
        if isinstance(operand, Mapping):
            return True
        if any(hasattr(operand, attribute) for attribute in MEMORY):
            return False
        return _sliceable(operand) or hasattr(operand, "__dask_graph__")

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        _check_array(name, operand)
        return LazyMatrix(name, operand)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        _check_array(name, operand)
        source, kind, names = _unwrapped(operand)
        shape = _known_shape(name, source)
        chunk, touched = _chunks(source, shape)
        turn = nullcontext() if kind in CONCURRENT else _serial
        return BoxMatrix(
            *(name, folding.fold(name, shape, names), source),
            chunk=tuple(map(max, chunk, touched)),
            declared=of_object(operand, numpy_dtype(source).newbyteorder("=")),
            store=kind,
            turn=turn,
            load=_computed if kind == "dask" else np.asarray,
        )

    def location(self, operand: Any) -> tuple[str, str | None]:
        return package(operand), None


class LazyMatrix(ReadOnly):
    """A read-only matrix. Its blocks are slices of an object that has a shape, a dtype and slicing."""

    what = "a lazy array"

    def __init__(self, name: str, source: Any) -> None:
        """Wrap an object. Raises `InputError` if it cannot be an operand."""
        attributes = source
        source, kind, names = _unwrapped(source)
        shape = _known_shape(name, source)
        self.name = name
        self.declared = of_object(attributes, numpy_dtype(source).newbyteorder("="))
        self.shape, self.dtype = checked(name, shape, numpy_dtype(source), self.declared, names)
        self._source = source
        self.kind = kind
        self._turn: AbstractContextManager[Any] = nullcontext() if kind in CONCURRENT else _serial
        if kind not in CONCURRENT:
            self._check_slices()
        self._chunk, touched = ((extents[0], extents[1]) for extents in _chunks(source, self.shape))
        self._piece = max(1, BATCH_BYTES // self.dtype.itemsize)
        size = touched[0] * touched[1] * self.dtype.itemsize
        self.layout: Layout = Chunked(
            read_chunk=self._chunk,
            partial_reads=False,
            decode_bytes=COPIES * (size if size >= BATCH_BYTES else BATCH_BYTES + size),
        )

    def _check_slices(self) -> None:
        """Raise `InputError` unless a slice of one element converts to an array of shape (1, 1)."""
        if 0 in self.shape:
            return
        kind = type(self._source).__name__
        hint = ".toarray()" if hasattr(self._source, "toarray") else "np.asarray"
        try:
            block = self._source[0:1, 0:1]
            shape = np.asarray(block).shape
        except Exception as error:  # slicing may raise any exception
            raise InputError(
                f"{self.name}: {kind} cannot be sliced as [0:1, 0:1] ({error}): convert it with {hint}"
            ) from error
        if hasattr(block, "toarray"):
            hint = hint if hint != "np.asarray" else "[:].toarray()"
            raise InputError(
                f"{self.name}: {kind} is sparse, and a product needs a dense matrix: convert it with {hint}"
            )
        if shape != (1, 1):
            raise InputError(f"{self.name}: slicing {kind} does not give an array: convert it with {hint}")

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._piece):
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            with self._turn:
                self._copy(slice(r0, r1), slice(c0, c1), part)

    def _copy(self, rows: slice, cols: slice, out: Array) -> None:
        found = self._source[rows, cols]
        if self.kind == "dask":
            found = _computed(found)
        if np.ma.is_masked(found):
            raise ExecutionError("elements are masked: replace them, with .filled(value)")
        block = np.asarray(found)
        if block.shape != out.shape or block.dtype.newbyteorder("=") != self.dtype:
            raise ExecutionError(
                f"{self.kind} returned a block of shape {block.shape} and dtype {block.dtype}, where "
                f"{out.shape} and {self.dtype} were expected"
            )
        np.copyto(out, block, casting="equiv")


def _check_array(name: str, operand: Any) -> None:
    """Raise `InputError` for a collection, and for an object of dask that is not an array."""
    if isinstance(operand, Mapping):
        raise InputError(f"{name}: {type(operand).__name__} is a collection: {_choice(operand)}")
    if not _sliceable(operand):  # a dask bag or delayed object: np.asarray would compute it as a whole
        raise InputError(
            f"{name}: {type(operand).__name__} is not an array: convert it with .to_dask_array(lengths=True)"
        )


def _unwrapped(source: Any) -> tuple[Any, str, Sequence[str | None] | None]:
    """Return the object that is sliced, the name of its package, and the names of its axes if it has any."""
    kind = package(source)
    names: Any = None
    if kind == "xarray":
        names = [str(name) for name in source.dims]
        if source.chunks is not None:
            source, kind = source.data, package(source.data)  # the wrapped dask array; nothing is computed
    elif kind == "tensorstore":
        source = source.translate_to[0]  # its indices may begin at any number: make them begin at 0
        names = [label or None for label in source.domain.labels]
    elif kind == "h5py":
        names = axis_names(source)
    return source, kind, names


def axis_names(dataset: Any) -> list[str | None]:
    """Return the names of the axes of an HDF5 dataset: the labels or the scales of its dimensions."""
    found: list[str | None] = []
    for dimension in getattr(dataset, "dims", ()):
        with suppress(Exception):  # h5py raises exceptions of many types
            scales = [scale.name.rpartition("/")[2] for scale in dimension.values()]
            found.append(str(dimension.label) or next(iter(scales), None))
            continue
        found.append(None)
    return found


def _known_shape(name: str, source: Any) -> tuple[int, ...]:
    shape = tuple(source.shape)
    if not all(isinstance(extent, Integral) for extent in shape):
        raise InputError(f"{name} has the unknown shape {shape}: call {name}.compute_chunk_sizes() first")
    return shape


def _choice(collection: Mapping[Any, Any]) -> str:
    """Return the last part of a message, which says which arrays of a collection can be passed."""
    found: dict[bool, list[str]] = {True: [], False: []}
    for key in islice(collection, MAX_LISTED):
        with suppress(Exception):  # a link of HDF5 may lead nowhere
            is_array = _sliceable(collection[key]) or isinstance(collection[key], np.ndarray | list)
            found[is_array].append(repr(key))
    if found[True]:
        return f"give one array of it ({', '.join(found[True])})"
    if found[False]:
        return f"it has no arrays itself; give an array in one of {', '.join(found[False])}"
    return "it is empty; give an array"


def _sliceable(source: Any) -> bool:
    """Return whether an object has a shape, a dtype that NumPy knows, and an indexing method."""
    if hasattr(source, "shape") and hasattr(source, "__getitem__"):
        with suppress(AttributeError, TypeError):
            numpy_dtype(source)
            return True
    return False


def numpy_dtype(source: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of an array. Raises `AttributeError` or `TypeError` if it has none."""
    dtype: np.dtype[Any] = np.dtype(getattr(source.dtype, "numpy_dtype", source.dtype))
    return dtype


def _computed(block: Any) -> Any:
    """Compute and return a piece of a dask array, in this thread unless the user has chosen a scheduler."""
    chosen = importlib.import_module("dask").config.get("scheduler", None)
    return block.compute(scheduler=None if chosen else "synchronous")


def _chunks(source: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chunk shape that the planner assumes, and the largest block computed to read such a chunk.

    The chunks of a dask array may differ. The planner assumes that all have the maximum extents. To read such
    an assumed chunk, dask computes all of its own chunks that overlap with the assumed one. For an array
    without chunks, the planner assumes chunks of one row.
    """
    found = getattr(source, "chunks", None)
    if found is None and package(source) == "tensorstore":
        found = source.chunk_layout.read_chunk.shape
    elif found is None and package(source) == "xarray":
        preferred = source.encoding.get("preferred_chunks", {})
        found = tuple(preferred.get(dim) for dim in source.dims)
    if not isinstance(found, tuple) or len(found) != len(shape) or not all(found):
        row = min(max(1, shape[-1]), ROW_BYTES // numpy_dtype(source).itemsize) if shape else 1
        one = *(1 for _ in shape[1:]), row
        return one, one
    extents, touched = [], []
    for chunk, extent in zip(found, shape, strict=True):
        sizes = chunk if isinstance(chunk, Sequence) else (min(int(chunk), extent),)
        largest = max(1, *(int(size) for size in sizes))
        extents.append(largest)
        touched.append(_touched(sizes, largest) if isinstance(chunk, Sequence) else largest)
    return tuple(extents), tuple(touched)


def _touched(sizes: Sequence[int], cell: int) -> int:
    """Return how many elements of an axis are computed, at most, to read a range of `cell` elements.

    `sizes` are the extents of the chunks along the axis. Ranges begin at multiples of `cell`. Every chunk
    that a range overlaps is computed whole.

    >>> _touched((4, 4, 2), 4), _touched((1, 4, 4, 1), 4), _touched((0,), 1)
    (4, 8, 1)
    """
    borders = [0, *accumulate(sizes)]
    largest = 1
    for start in range(0, borders[-1], cell):
        stop = min(start + cell, borders[-1])
        largest = max(
            largest, borders[bisect_left(borders, stop)] - borders[bisect_right(borders, start) - 1]
        )
    return largest
