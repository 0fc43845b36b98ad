"""Arrays in host memory: NumPy arrays, memory maps, scratch memory of threads, and results of sinks.

Threads keep their scratch memory: the page faults of a new large array take longer than the arithmetic on it.

`SparseMatrix` keeps the elements of C that are at or above a threshold. If C is symmetric, callers add only
elements of its lower triangle, and each stands for its mirror image too.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np

from oocgemm.errors import ExecutionError, InputError
from oocgemm.planning import GemmProblem, InMemory, Layout, Op
from oocgemm.planning.device_memory import NONE
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores.base import (
    Array,
    InProcess,
    Matrix,
    Store,
    checked,
    file_identities,
    is_path,
    not_writable,
    refuse_zarr_options,
)
from oocgemm.stores.boxes import BoxMatrix
from oocgemm.stores.files import DONT_NEED, WILL_NEED, advise, read_fully, write_fully
from oocgemm.stores.folding import Fold, Folding
from oocgemm.values import dataclass

# Before a block of a memory map is copied, one call requests all pages between its first and last element. No
# call is made if this range has fewer than MIN_PREFETCH bytes, or more than MAX_PREFETCH_RATIO times the
# bytes of the block: a sparse block needs only few of the pages.
MIN_PREFETCH = 1 << 20
MAX_PREFETCH_RATIO = 16
# A block of a memory map is copied in parts that span about this many bytes of the file. The pages of each
# copied part are removed from the resident set of the process, which therefore stays small.
BAND_BYTES = 4 << 20
# `InMemory.zero_copy_width` of an array, in bytes. If the rows of a block have at least half of this size,
# the GPU copies the block directly from a pinned array. Shorter rows are gathered in pinned buffers first. On
# an H200, while a kernel ran, direct copies reached 31-36 GB/s with rows of 16 KiB, 48-53 GB/s with 32 KiB,
# and 54 GB/s with 96 KiB.
MIN_ROW_BYTES = 32 << 10
# The CUDA driver copies two-dimensional blocks only if their rows begin less than this many bytes apart.
MAX_STRIDE = 1 << 31


class Arrays(Store):
    """Open NumPy arrays and memory maps."""

    kind = "memory"

    def matches(self, operand: Any) -> bool:
        return isinstance(operand, np.ndarray)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        _check_unmasked(name, operand)
        if writable and not operand.flags.writeable:
            raise not_writable(name)
        return ArrayMatrix(name, operand)

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        _check_unmasked(name, operand)
        return fold_array(name, folding.fold(name, operand.shape), operand)

    def new_layout(
        self, path: str, problem: GemmProblem, chunks: tuple[int, int] | None, compressor: str | None
    ) -> Layout:
        """Return the layout of a result that is a new ndarray. It has no path: `path` is ignored.

        Raises `InputError` for `chunks` or a `compressor`, which an ndarray does not have.
        """
        refuse_zarr_options("an ndarray", chunks, compressor)
        size = problem.itemsizes["C"]
        return _layout(size, min(problem.n, -(-MIN_ROW_BYTES // size)), True)


class ArrayLikes(Store):
    """Open any other object that NumPy converts to an array, read-only."""

    kind = "memory"

    def matches(self, operand: Any) -> bool:
        return not is_path(operand)

    def open(self, name: str, operand: Any, *, writable: bool = False, journal: Path | None = None) -> Matrix:
        if writable:
            raise not_writable(name)
        return ArrayMatrix(name, _converted(name, operand))

    def fold(self, name: str, operand: Any, folding: Folding) -> Matrix:
        array = _converted(name, operand)
        return fold_array(name, folding.fold(name, array.shape), array)


def _converted(name: str, operand: Any) -> Array:
    if wanted := _instead_of(operand):
        raise InputError(f"{name} is {wanted}")
    try:
        return np.asarray(operand)
    except Exception as error:  # the object's conversion may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name}: {type(operand).__name__} cannot be turned into an array: {reason}"
        ) from error


def _check_unmasked(name: str, operand: Any) -> None:
    if isinstance(operand, np.ma.MaskedArray):
        raise InputError(f"{name} is a masked array: replace the masked elements, with .filled(value)")


def _instead_of(operand: Any) -> str:
    """Return a text that says what an unsuitable object is and what to pass instead; "" for other objects."""
    if operand is None:
        return "None: pass an array or a path"
    if isinstance(operand, bytes):
        return f"bytes: pass a path as a string, {os.fsdecode(operand[:200])!r}"
    if hasattr(operand, "read") and hasattr(operand, "seek"):
        path = getattr(operand, "name", None)
        return f"an open file: pass its path{f', {path!r}' if isinstance(path, str) else ', or an array'}"
    return ""


@lru_cache(64)
def _layout(itemsize: int, zero_copy_width: int, in_place: bool) -> Layout:
    return InMemory(itemsize=itemsize, zero_copy_width=zero_copy_width, in_place=in_place)


def fold_array(name: str, fold: Fold, array: Array) -> Matrix:
    """Return the matrix that is folded from an array in memory: a view of it if its strides allow one."""
    used = array[tuple(slice(axis.start, axis.start + axis.extent) for axis in fold.axes)]
    turned = used.transpose(fold.order)
    if _merges(turned, 0, len(fold.rows)) and _merges(
        turned, len(fold.rows), len(fold.rows) + len(fold.cols)
    ):
        return ArrayMatrix(name, turned.reshape(fold.shape))
    return BoxMatrix(name, fold, array)


def _merges(array: Array, first: int, last: int) -> bool:
    """Return whether the axes [first, last) of an array become one axis without a copy."""
    axes = [at for at in range(first, last) if array.shape[at] > 1]
    if 0 in array.shape:
        return True
    return all(array.strides[at] == array.strides[after] * array.shape[after] for at, after in pairwise(axes))


class ArrayMatrix(InProcess):
    """A matrix in a NumPy array or a memory map, which is read and written with `np.copyto`."""

    def __init__(self, name: str, array: Array) -> None:
        self.shape, self.dtype = checked(name, array.shape, array.dtype)
        self.name = name
        self.array = array
        self._map = _underlying_map(array)
        self._file_bytes = self._map.size() if self._map is not None else 0
        self._droppable = None if _is_private(array) else self._map
        # Blocks of a memory map are copied, so that their pages do not stay in the resident set.
        width = 0 if self.is_mapped() else _min_row_elements(array)
        self.layout = _layout(
            self.dtype.itemsize, width, not self.is_mapped() and _has_contiguous_rows(array)
        )

    def memory(self) -> Array | None:
        return self.array

    def is_mapped(self) -> bool:
        return self._map is not None

    def cached_chunks(self) -> None:
        """Return None: the elements are in memory."""

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        self._check_length()
        for source, target in self._bands(self.array[slice(*rows), slice(*cols)], out):
            if self._map is not None:
                _prefetch(self._map, source)
            np.copyto(target, source, casting="equiv")
            self._drop(source)

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        self._check_length()
        for target, source in self._bands(self.array[slice(*rows), slice(*cols)], data):
            np.copyto(target, source, casting="equiv")
            self._drop(target)

    def _bands(self, block: Array, other: Array) -> Iterator[tuple[Array, Array]]:
        """Yield pairs of equal parts of two arrays. Parts of a memory map span about `BAND_BYTES`."""
        axis = 0 if abs(block.strides[0]) >= abs(block.strides[1]) else 1
        extent = block.shape[axis]
        count = extent if self._map is None else max(1, BAND_BYTES // max(1, abs(block.strides[axis])))
        for first in range(0, extent, max(1, count)):
            part = (slice(None),) * axis + (slice(first, first + count),)
            yield block[part], other[part]

    def sync(self) -> None:
        if isinstance(self.array, np.memmap):
            self.array.flush()

    def set_finished(self, finished: bool, uplo: str | None = None) -> None:
        pass

    def identities(self) -> set[object]:
        """Return the id of the file that the array is mapped from; an empty set if there is none."""
        array = self.array
        while isinstance(array, np.ndarray):
            if isinstance(array, np.memmap) and array.filename is not None:
                return file_identities(array.filename)
            array = array.base  # type: ignore[assignment]
        return set()

    def shares_map(self, other: "ArrayMatrix") -> bool:
        """Return whether both matrices are parts of the same memory map, overlapping or not."""
        return self._map is not None and self._map is other._map

    def _check_length(self) -> None:
        """Raise `EOFError` if the array maps a file that was truncated after this matrix was opened."""
        if self._map is not None and (size := self._map.size()) < self._file_bytes:
            raise EOFError(f"the file was truncated from {self._file_bytes} bytes to {size}")

    def _drop(self, block: Array) -> None:
        """Remove the pages of a block of a memory map from the resident set. The file keeps all writes."""
        if self._droppable is not None:
            _advise(self._droppable, DONT_NEED, block)


def by_rows(matrix: Matrix, op: Op) -> tuple[Matrix, Op]:
    """Replace a matrix in column-major order, such as X.T, by its row-major transpose, and adapt `op`.

    Such a matrix is an array in memory, or has a method `transposed` and columns that are contiguous. Other
    matrices are returned unchanged, and so is every matrix if `op` is the conjugate transpose.
    """
    if isinstance(matrix, ArrayMatrix) and matrix.layout.in_memory and op is not Op.C:
        flags = matrix.array.flags
        if flags.f_contiguous and not flags.c_contiguous:
            return ArrayMatrix(matrix.name, matrix.array.T), Op.N if op.swaps else Op.T
    transposed = getattr(matrix, "transposed", None)
    if transposed is not None and matrix.layout.contiguous == 0 and op is not Op.C:
        return transposed(), Op.N if op.swaps else Op.T
    return matrix, op


def like(matrix: Matrix, array: Any) -> Matrix:
    """Return a matrix with another array, which has the shape, strides and dtype of the array of `matrix`."""
    assert isinstance(matrix, ArrayMatrix)
    found = object.__new__(ArrayMatrix)
    vars(found).update(vars(matrix), array=array)
    return found


def viewed(matrix: Matrix, rows: Range, cols: Range) -> Array | None:
    """Return a read-only block as a view, if a BLAS can multiply blocks of the matrix in place; else None."""
    if isinstance(matrix, ArrayMatrix) and matrix.layout.in_place:
        return matrix.array[slice(*rows), slice(*cols)]
    return None


def is_plain(array: object) -> bool:
    """Return whether an object is an ndarray, not of a subclass, that is not a view of a memory map."""
    return type(array) is np.ndarray and _underlying_map(array) is None


def _min_row_elements(array: Array) -> int:
    """Return `InMemory.zero_copy_width` of an array; 0 if the GPU cannot copy its blocks directly."""
    cols, (stride, step), size = int(array.shape[1]), array.strides, int(array.itemsize)
    contiguous = step == size and cols * size <= stride < MAX_STRIDE and array.ctypes.data % size == 0
    if not contiguous or not array.size or not array.dtype.isnative:
        return 0
    return min(cols, -(-MIN_ROW_BYTES // size))


def _has_contiguous_rows(array: Array) -> bool:
    """Return whether a BLAS can multiply blocks of an array in place."""
    (rows, cols), (stride, step), size = array.shape, array.strides, array.itemsize
    contiguous = cols == 1 or step == size
    apart = rows == 1 or (stride >= cols * size and stride % size == 0)
    return bool(contiguous and apart and array.flags.aligned and array.dtype.isnative)


def _prefetch(mapped: mmap.mmap, block: Array) -> None:
    """Ask the system to load all pages that a block spans, unless the block is small or sparse."""
    low, high = np.lib.array_utils.byte_bounds(block)
    if MIN_PREFETCH <= high - low <= MAX_PREFETCH_RATIO * block.nbytes:
        _advise(mapped, WILL_NEED, block)


def _advise(mapped: mmap.mmap, advice: int | None, block: Array) -> None:
    low, high = np.lib.array_utils.byte_bounds(block)
    start = low - np.frombuffer(mapped, np.uint8).ctypes.data
    page = start % mmap.PAGESIZE
    advise(mapped, advice, start - page, high - low + page)


def _underlying_map(array: Any) -> mmap.mmap | None:
    """Return the memory map of which an array is a view; None if the array is not mapped."""
    named = False
    while array is not None and not isinstance(array, mmap.mmap):
        named = named or (isinstance(array, np.memmap) and array.filename is not None)
        array = getattr(array, "base", None)
    return array if named else None


def _is_private(array: Any) -> bool:
    """Return whether an array is a view of a copy-on-write map, whose changes never reach the file."""
    while array is not None:
        if isinstance(array, np.memmap) and array.mode == "c":
            return True
        array = getattr(array, "base", None)
    return False


_kept = threading.local()


def in_float64(block: Array) -> Array:
    """Return the elements of a block in float64. The next call in this thread overwrites the result."""
    wide = scratch_array("float64", block.shape, np.dtype(np.float64))
    np.copyto(wide, block, casting="unsafe")
    return wide


def scratch_array(purpose: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return scratch memory of this thread as an array. The next call with this `purpose` reuses it."""
    size = prod(shape) * dtype.itemsize
    kept: Array | None = getattr(_kept, purpose, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.uint8)
        setattr(_kept, purpose, kept)
    return kept[:size].view(dtype).reshape(shape)


def read_block(purpose: str, matrix: Matrix, rows: Range, cols: Range) -> Array:
    """Return a block of a matrix: a view, or a copy in `scratch_array` memory. Callers must not change it."""
    block = viewed(matrix, rows, cols)
    if block is None:
        block = scratch_array(purpose, (rows[1] - rows[0], cols[1] - cols[0]), matrix.dtype)
        matrix.read(rows, cols, block)
    return block


# Elements of a `SparseMatrix` that are moved at a time. All of them may not fit in memory.
MOVED = 1 << 20
# The elements that were kept of a block of C, row by row: the rows and the columns of the block, the number
# of elements per row, and the column and the score of each element.
State = tuple[Range, Range, Array, Array, Array]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which elements of C are kept: those whose score is at least `threshold`.

    Attributes:
        threshold: the minimum score, or with `absolute` the minimum magnitude of a score.
        absolute: whether the magnitudes of scores are compared with the threshold.
        excludes_self: whether elements on C's diagonal are left out.
        scales: factors for the rows and for the columns of C. The products are clipped to [-1, 1] and are the
            scores. If `scales` is None, the elements themselves are the scores.
        symmetric: whether C is symmetric. Only elements of its lower triangle are then added.
        once: with `symmetric`, whether each pair is kept once, right of the diagonal.
    """

    threshold: float
    absolute: bool
    excludes_self: bool
    scales: Array | None = None
    symmetric: bool = True
    once: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The elements of a `State`, or with `mirrors` the mirror images of such elements."""

    rows: Range
    cols: Range
    counts: Array
    columns: Array
    scores: Array
    mirrors: bool = False

    def mirrored(self) -> "_Part":
        """Return the mirror images of the elements that are not on C's diagonal, also row by row."""
        rows = np.repeat(np.arange(*self.rows), self.counts)
        columns, scores, (left, right) = self.columns, self.scores, self.cols
        if self.rows[0] < right:
            away = columns != rows
            rows, columns, scores = rows[away], columns[away], scores[away]
        at = (columns - left).astype(np.uint32)
        # NumPy sorts 16-bit integers by radix. That takes a tenth of the time of a sort of wider integers.
        order = np.argsort(at.astype(np.uint16), kind="stable")
        if right - left > 1 << 16:
            order = order[np.argsort((at[order] >> 16).astype(np.uint16), kind="stable")]
        counts = np.bincount(at, minlength=right - left)
        return _Part(self.cols, self.rows, counts, rows[order], scores[order], mirrors=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The elements that a device found in a block of C, in the form in which the device returns them."""

    rows: Range
    cols: Range
    segments: Array
    elements: Array

    def part(self) -> _Part:
        segments, (top, bottom) = self.segments, self.rows
        order = np.lexsort((segments["first"], segments["row"]))
        sizes = segments["count"][order].astype(np.int64)
        # Gather the elements of the segments in this order, one segment after the other.
        shift = segments["first"][order].astype(np.int64) - (np.cumsum(sizes) - sizes)
        ordered = self.elements[np.repeat(shift, sizes) + np.arange(len(self.elements))]
        counts = np.bincount(segments["row"][order], sizes, bottom - top).astype(np.int64)
        columns, scores = ordered["index"].astype(np.int64), np.ascontiguousarray(ordered["score"])
        return _Part(self.rows, self.cols, counts, columns, scores)


@dataclass(frozen=True, slots=True, eq=False)
class _Spilled:
    """The elements of a `_Part` in a file, from a byte on: first all columns, then all scores."""

    rows: Range
    cols: Range
    counts: Array
    mirrors: bool
    file: int
    at: int
    dtype: np.dtype[Any]

    def part(self) -> _Part:
        count, at = int(self.counts.sum()), self.at
        columns, scores = np.empty(count, np.int64), np.empty(count, self.dtype)
        for array in (columns, scores):
            read_fully(self.file, array.view(np.uint8), at)
            at += array.nbytes
        return _Part(self.rows, self.cols, self.counts, columns, scores, self.mirrors)


class SparseMatrix(InProcess):
    """A `Collecting` result C: it keeps only the elements that a rule selects. It cannot be read.

    Elements that do not fit in memory are *spilled* to a temporary file, if there is a folder for it.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        score: np.dtype[Any],
        rule: Rule,
        limit: int,
        folder: str | None = None,
    ) -> None:
        """Keep elements as scores of dtype `score`, in at most `limit` bytes of memory.

        If `folder` is not None, further elements are spilled to a file in it, which has no name. Then `csr`
        returns arrays in further such files.
        """
        self.name, self.shape, self.dtype = name, shape, score
        self.layout = InMemory(itemsize=score.itemsize)
        self._rule, self._limit = rule, limit
        self._scales = None if rule.scales is None else rule.scales.astype(score)
        # Parts are sorted while the device is computing others.
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="oocgemm-sparse")
        self._parts: list[Future[tuple[_Part | _Spilled, ...]]] = []
        self._bytes, self._adding = 0, Lock()
        self._folder, self._spilled_bytes = folder, 0
        self._file = -1  # the descriptor of the file of spilled elements
        self._ordered: tuple[Array, Array, Array] | None = None

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        raise AssertionError("elements that are not kept are unknown")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Keep the elements of a block that the rule selects."""
        scores = data
        if self._scales is not None:
            scores = data * (self._scales[slice(*rows), None] * self._scales[slice(*cols)])
            np.clip(scores, -1, 1, out=scores)  # keeps NaN
        bound, scores = self.dtype.type(self._rule.threshold), np.ascontiguousarray(scores)
        kept = np.flatnonzero((np.abs(scores) if self._rule.absolute else scores) >= bound)
        at, columns = np.divmod(kept, cols[1] - cols[0])
        if cols[1] > rows[0]:
            right = columns + (cols[0] - rows[0]) - at  # 0 on the diagonal
            if self._rule.symmetric:
                inside = right <= -self._rule.excludes_self
                at, columns, kept = at[inside], columns[inside], kept[inside]
            elif self._rule.excludes_self:
                inside = right != 0
                at, columns, kept = at[inside], columns[inside], kept[inside]
        counts = np.bincount(at, minlength=rows[1] - rows[0])
        self._add(_Part(rows, cols, counts, columns + cols[0], scores.ravel()[kept]), len(columns))

    def put(self, rows: Range, cols: Range, segments: Array, elements: Array) -> None:
        """Keep the elements of a block that a device has found (`oocgemm.backends.base.SEGMENTS`)."""
        self._add(_Found(rows, cols, segments, elements), len(elements))

    def _parts_of(self, found: _Part | _Found) -> tuple[_Part, ...]:
        part = found.part() if isinstance(found, _Found) else found
        if not self._rule.symmetric or part.mirrors:
            return (part,)
        return (part.mirrored(),) if self._rule.once else (part, part.mirrored())

    def _add(self, part: _Part | _Found, count: int) -> None:
        with self._adding:
            sides = 2 if self._rule.symmetric and not self._rule.once else 1
            self._bytes += sides * count * (8 + self.dtype.itemsize)
            spills = self._bytes > self._limit
            if spills and self._folder is None:
                remedy = (
                    "out, a larger min_r2, or a smaller window" if self._rule.once else "a larger threshold"
                )
                self._pool.shutdown(wait=False, cancel_futures=True)
                raise ExecutionError(
                    f"the elements found so far take {format_size(self._bytes)}, more than the "
                    f"{format_size(self._limit)} of memory for them: pass {remedy}"
                )
            if count and not spills:
                self._parts.append(self._pool.submit(self._parts_of, part))
        if count and spills:
            done = Future[tuple[_Part | _Spilled, ...]]()
            done.set_result(tuple(map(self._spilled, self._parts_of(part))))
            self._parts.append(done)

    def _spilled(self, part: _Part) -> _Spilled:
        arrays = np.ascontiguousarray(part.columns, np.int64), np.ascontiguousarray(part.scores)
        with self._adding:
            if self._file < 0:
                with TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
                finalize(self, os.close, self._file)
            at = self._spilled_bytes
            self._spilled_bytes += sum(array.nbytes for array in arrays)
        to = at
        for array in arrays:
            write_fully(self._file, array.view(np.uint8), to)
            to += array.nbytes
        given = part.rows, part.cols, part.counts, part.mirrors
        return _Spilled(*given, self._file, at, part.scores.dtype)

    def _array(self, count: int, dtype: Any) -> Array:
        """Return an array for all elements: in memory, or in a file if some elements are in one."""
        if self._file < 0 or not count:
            return np.empty(count, dtype)
        with TemporaryFile(dir=self._folder) as file:  # the map keeps it
            return np.memmap(file, dtype, "w+", shape=(count,))

    def state(self) -> list[State]:
        """Return the kept elements, for `merge` in another process. Call this method after the last write."""
        once = self._rule.once
        found = (part for each in self._parts for part in each.result() if part.mirrors == once)
        parts = (part.part() if isinstance(part, _Spilled) else part for part in found)
        return [(part.rows, part.cols, part.counts, part.columns, part.scores) for part in parts]

    def merge(self, state: Sequence[State]) -> None:
        """Add the elements that another process has kept. That process must have written other tiles."""
        for rows, cols, counts, columns, scores in state:
            self._add(_Part(rows, cols, counts, columns, scores, self._rule.once), len(columns))

    def csr(self) -> tuple[Array, Array, Array]:
        """Return all elements row by row, in ascending order of columns: row starts, columns, and scores."""
        if self._ordered is None:
            self._ordered = self._order()
        return self._ordered

    def settle(self, at: Array, scores: Array, kept: Array) -> None:
        """Replace the scores of the elements number `at` in `csr`. Drop those for which `kept` is false."""
        starts, columns, every = self.csr()
        every[at] = scores
        dropped = at[~kept]
        rows = np.searchsorted(starts, dropped, side="right")
        counts = np.diff(starts) - np.bincount(rows, minlength=len(starts))[1:]
        for number, (first, last) in enumerate(pairwise([*dropped, len(columns)])):
            for start in range(first + 1, last, MOVED):
                stop = min(start + MOVED, last)
                for array in (columns, every):
                    array[start - number - 1 : stop - number - 1] = array[start:stop]
        total = len(columns) - len(dropped)
        self._ordered = np.append(0, np.cumsum(counts)), columns[:total], every[:total]

    def _order(self) -> tuple[Array, Array, Array]:
        with self._pool as pool:
            # Sort the parts by columns. The part on the diagonal comes before its mirror image, which may
            # begin at the same column.
            parts = [part for each in self._parts for part in each.result()]
            self._parts.clear()
            parts.sort(key=lambda part: (part.cols[0], part.mirrors))
            totals = np.zeros(self.shape[0] + 1, np.int64)
            for part in parts:
                totals[part.rows[0] + 1 : part.rows[1] + 1] += part.counts
            starts = np.cumsum(totals)
            columns, scores = self._array(starts[-1], np.int64), self._array(starts[-1], self.dtype)

            def place(part: _Part | _Spilled, firsts: Array) -> None:
                """Copy the elements of a part to the result. `firsts` has the first index for each row."""
                part = part.part() if isinstance(part, _Spilled) else part
                shift = firsts - (np.cumsum(part.counts) - part.counts)
                to = np.repeat(shift, part.counts) + np.arange(len(part.columns))
                columns[to], scores[to] = part.columns, part.scores

            free, placed = starts[:-1].copy(), []
            for part in parts:
                rows = slice(*part.rows)
                placed.append(pool.submit(place, part, free[rows].copy()))
                free[rows] += part.counts
            for each in placed:
                each.result()
        return starts, columns, scores


class RankedMatrix(InProcess):
    """The best elements (`SELECTED`) of each row. Each write merges more candidates into them.

    Larger scores come first. Equal scores are ordered by index, and NaN comes last. This order is total, so
    the result does not depend on the order of writes, or on how candidates are grouped.
    """

    def __init__(self, name: str, array: Array) -> None:
        """Keep elements in `array`, which is first filled with `NONE`: no element has been found yet."""
        self.name, self.shape, self.dtype = name, array.shape, array.dtype
        self.layout = InMemory(itemsize=array.dtype.itemsize)
        self._array, self._merging = array, Lock()
        array.view(np.uint8)[...] = NONE

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        raise AssertionError("elements are not complete before `merged`")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Merge candidates into the best elements of some rows. Bytes of `NONE` stand for no element."""
        with self._merging:
            best = self._array[slice(*rows)]
            every = np.concatenate((best, data), axis=1)
            # NaN is sorted to the end.
            order = np.lexsort((every["index"], -every["score"]))[:, : best.shape[1]]
            best[...] = np.take_along_axis(every, order, axis=1)

    def merged(self) -> Matrix:
        """Return the best elements as a matrix. Call this method after the last write."""
        return ArrayMatrix(self.name, self._array)
