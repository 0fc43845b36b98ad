"""Read lazy operands: objects that read or compute a block when they are sliced.

Arrays of dask, h5py, xarray and tensorstore are lazy. A lazy operand is never converted as a whole. Each read
copies one piece after the other into the slot. A piece is one chunk, a batch of small chunks, or part of an
array without chunks. `Layout.decode_bytes` counts what a piece allocates, so the host budget bounds it.
Memory that the graph of a dask array uses beside its chunks is unknown, and is not counted.
"""

import importlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.stores.base import (
    BATCH_BYTES,
    Array,
    Matrix,
    Store,
    checked,
    is_path,
    not_writable,
    package,
    pieces,
)

# Packages whose arrays several threads may read at once. h5py has its own lock.
CONCURRENT = ("dask", "h5py", "tensorstore", "xarray")
COPIES = 3  # of a piece in memory: as stored, as decoded, and as returned
# An array without chunks is read in segments of rows of this many bytes: shorter segments are slow.
ROW_BYTES = 16 << 10
# Attributes of objects that expose their memory, which NumPy converts without a copy.
MEMORY = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")
# Arrays of all other packages are read by one thread at a time: their C libraries may share state.
_serial = threading.Lock()


class LazyArrays(Store):
    """Open lazy operands, read-only. It also matches collections of arrays, in order to refuse them."""

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
        if isinstance(operand, Mapping):
            names = ", ".join(repr(key) for key in list(operand)[:8])
            raise InputError(
                f"{name}: {type(operand).__name__} is a collection: give one array of it ({names})"
            )
        if not _sliceable(operand):  # NumPy would compute it as a whole
            raise InputError(
                f"{name}: {type(operand).__name__} is not an array: convert it with "
                ".to_dask_array(lengths=True)"
            )
        return LazyMatrix(name, operand)

    def location(self, operand: Any) -> tuple[str, str | None]:
        return package(operand), None


class LazyMatrix:
    """An object with shape, dtype and slicing, read piece by piece."""

    def __init__(self, name: str, source: Any) -> None:
        """Raise `InputError` for an object that cannot be an operand."""
        kind = package(source)
        if kind == "xarray" and source.chunks is not None:
            source, kind = source.data, package(source.data)  # the dask array, not computed
        if kind == "tensorstore":
            source = source.translate_to[0]  # indices may start elsewhere
        shape = tuple(source.shape)
        if not all(isinstance(extent, Integral) for extent in shape):
            raise InputError(f"{name} has the unknown shape {shape}: call {name}.compute_chunk_sizes() first")
        self.name = name
        self.shape, self.dtype = checked(name, shape, numpy_dtype(source))
        self._source = source
        self._kind = kind
        self._turn: AbstractContextManager[Any] = nullcontext() if kind in CONCURRENT else _serial
        if kind not in CONCURRENT:
            self._check_slices()
        self._chunk, touched = _chunks(source, self.shape)
        self._piece = max(1, BATCH_BYTES // self.dtype.itemsize)
        size = touched[0] * touched[1] * self.dtype.itemsize
        self.layout = Layout(
            read_chunk=self._chunk,
            partial_reads=False,
            decode_bytes=COPIES * (size if size >= BATCH_BYTES else BATCH_BYTES + size),
        )

    def _check_slices(self) -> None:
        """Raise `InputError` unless slicing the object gives an array."""
        kind = type(self._source).__name__
        hint = ".toarray()" if hasattr(self._source, "toarray") else "np.asarray"
        try:
            shape = np.asarray(self._source[0:0, 0:0]).shape
        except Exception as error:  # slicing may raise any exception
            raise InputError(
                f"{self.name}: {kind} cannot be sliced as [0:1, 0:1] ({error}): convert it with {hint}"
            ) from error
        if shape != (0, 0):
            raise InputError(f"{self.name}: slicing {kind} does not give an array: convert it with {hint}")

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        """Fill `out` piece by piece.

        Raises `ExecutionError` for a piece of another shape or dtype, or with masked elements.
        """
        for (r0, r1), (c0, c1) in pieces(rows, cols, self._chunk, self._piece):
            part = out[r0 - rows[0] : r1 - rows[0], c0 - cols[0] : c1 - cols[0]]
            with self._turn:
                self._copy(slice(r0, r1), slice(c0, c1), part)

    def _copy(self, rows: slice, cols: slice, out: Array) -> None:
        found = self._source[rows, cols]
        if self._kind == "dask":
            found = _computed(found)
        if np.ma.is_masked(found):
            raise ExecutionError("elements are masked: replace them, with .filled(value)")
        block = np.asarray(found)
        if block.shape != out.shape or block.dtype.newbyteorder("=") != self.dtype:
            raise ExecutionError(
                f"{self._kind} returned a block of shape {block.shape} and dtype {block.dtype}, where "
                f"{out.shape} and {self.dtype} were expected"
            )
        np.copyto(out, block, casting="equiv")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Raise `ExecutionError`: a lazy operand is read-only."""
        raise ExecutionError(f"{self.name} is lazy and cannot be written to")

    def sync(self) -> None:
        """Do nothing: nothing is written."""

    def set_finished(self, finished: bool) -> None:
        """Do nothing: nothing is written."""

    def fingerprint(self) -> None:
        """Return None: nothing identifies the content."""

    def describe(self) -> dict[str, object]:
        """Return package, shape and dtype for the header of a timeline."""
        return {"store": self._kind, "path": None, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        """Return nothing: the files that it reads are unknown."""
        return set()


def _sliceable(source: Any) -> bool:
    """Return whether an object has a shape, a NumPy dtype and slices."""
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
    """Compute a piece of a dask array in this thread, unless the user chose a scheduler.

    dask's own threads would hold as many chunks in memory as there are cores.
    """
    chosen = importlib.import_module("dask").config.get("scheduler", None)
    return block.compute(scheduler=None if chosen else "synchronous")


def _chunks(source: Any, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the chunk extents of a regular grid for an array, and the extents read per chunk of it.

    The chunks of a dask array may differ in extent. The grid has the largest extent, so one chunk of the grid
    may touch several of the array's. For an array without chunks, segments of rows take the place of chunks.
    """
    found = getattr(source, "chunks", None)
    if found is None and package(source) == "tensorstore":
        found = source.chunk_layout.read_chunk.shape
    elif found is None and package(source) == "xarray":
        preferred = source.encoding.get("preferred_chunks", {})
        found = tuple(preferred.get(dim) for dim in source.dims)
    if not isinstance(found, tuple) or len(found) != 2 or not all(found):
        row = (1, min(max(1, shape[1]), ROW_BYTES // numpy_dtype(source).itemsize))
        return row, row
    extents, touched = [], []
    for chunk, extent in zip(found, shape, strict=True):
        sizes = chunk if isinstance(chunk, Sequence) else (min(int(chunk), extent),)
        largest = max(1, *(int(size) for size in sizes))
        extents.append(largest)
        touched.append(_touched(sizes, largest) if isinstance(chunk, Sequence) else largest)
    return (extents[0], extents[1]), (touched[0], touched[1])


def _touched(sizes: Sequence[int], cell: int) -> int:
    """Return the largest extent of whole chunks that a cell of a regular grid touches.

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
