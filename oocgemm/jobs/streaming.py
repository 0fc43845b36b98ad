"""Read an array once, block by block in several threads, and compute moments of its columns or rows.

Results are added up in an order that never changes. Of a sparse matrix, only the entries are read. The
moments of its other elements, which are 0, are then added to those of the entries.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix, pieces
from oocgemm.stores.arrays import in_float64, read_block, viewed
from oocgemm.stores.base import failure
from oocgemm.stores.capabilities import Listed, Piece
from oocgemm.stores.transformed import SLAB, chain_of, is_missing, positions
from oocgemm.system.installed import compiled

T = TypeVar("T")
S = TypeVar("S")
# Maximum numbers of threads of a pass, in all and per core. With two per core, one computes while the other
# reads from the disk.
MAX_THREADS, THREADS_PER_CORE = 16, 2
# Minimum bytes of a block. With smaller ones, threads mostly wait for the GIL.
BATCH_BYTES = 4 << 20
# Blocks of a plain array in memory are this many times as large, since they are not copied.
VIEWED = 4
# Columns of the blocks in which an array without chunks is read along its columns.
COLUMNS = 1 << 12

# Maximum number of squares of int8 that are added in float32. Each is at most 2^14, so sums up to 2^24 are
# exact.
INT8_DEPTH = 1 << 10
# Elements of a slab of int8. On many cores, threads wait for the GIL if there are fewer: 8 threads took 0.7 s
# for a pass over 20000 x 100000 elements, and 1.4 s with 2^19. On two cores, a pass over 20000 x 20000 took
# 0.55 s, and 0.29 s with 2^19, since 2^19 elements fit in a cache. Sums are exact, whatever the number.
INT8_SLAB = 1 << (21 if len(os.sched_getaffinity(0)) > 4 else 19)
# Elements of a slab of whole rows. With fewer, threads wait for the GIL: a pass over 200000 x 300 elements of
# float32 took 55 ms in 8 threads with 2^17 elements, and 30 ms with 2^19.
ROWS_SLAB = 1 << 19
# Temporary bytes for a slab: about 40 per element in float64, 8 per element of int8 or of whole rows.
SCRATCH = max(SLAB * 40, INT8_SLAB * 8, ROWS_SLAB * 8)
# Entries of a sparse matrix that a thread reads at a time, and bytes per entry of temporary arrays.
ENTRIES, ENTRY_BYTES = 1 << 18, 48
# Steps that keep zeros: they multiply, or take logarithms.
_SCALING, _KEEPS_ZEROS = ("normalize", "scale"), {"normalize", "scale", "log1p"}


def reduced(
    matrix: Matrix, axis: int, memory: int, scratch: int, act: Callable[[Range, Range, Array], T]
) -> Iterator[tuple[Range, Range, T]]:
    """Read a matrix, and yield the rows, the columns and a result of each of its blocks.

    Blocks and their order depend on the matrix alone. So results that are added up in this order are the same
    in every bit, whatever the number of threads.

    Args:
        matrix: the matrix that is read.
        axis: the axis along which `act` reduces a block.
        memory: upper bound in bytes, unless one thread needs more.
        scratch: bytes that `act` needs besides the block and its result. The result has at most 96 bytes per
            row or column.
        act: called by several threads with the rows, the columns and the elements of a block, which it must
            not keep or change.

    Raises:
        ExecutionError: a block cannot be read.
    """
    views = viewed(matrix, (0, 0), (0, 0)) is not None
    batch = max(1, BATCH_BYTES * (VIEWED if views else 1) // matrix.dtype.itemsize)
    unit = _unit(matrix, axis, batch)
    piece = 0 if views else max(unit[0] * unit[1], 2 * batch) * matrix.dtype.itemsize
    # Two blocks per thread are queued or in work, so that no thread waits while a result is used.
    lines = max(unit[1 - axis], min(batch, matrix.shape[1 - axis]))
    each = matrix.layout.decode_bytes + 2 * piece + scratch + 96 * lines
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(MAX_THREADS, THREADS_PER_CORE * cores, memory // each))
    todo = pieces((0, matrix.shape[0]), (0, matrix.shape[1]), unit, batch)

    def work(block: tuple[Range, Range]) -> T:
        rows, cols = block
        try:
            raw = read_block("raw", matrix, rows, cols)
        except Exception as error:  # a store may raise any exception
            raise ExecutionError(failure("reading", matrix, rows, cols, error)) from error
        return act(rows, cols, raw)

    for (rows, cols), result in _in_order(todo, work, threads):
        yield rows, cols, result


def _in_order(todo: Iterator[S], work: Callable[[S], T], threads: int) -> Iterator[tuple[S, T]]:
    """Yield what is in `todo`, in this order, with the results of `work`, which several threads call."""
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-stats") as pool:
        submitted = deque[tuple[S, Future[T]]]()

        def submit(count: int) -> None:
            submitted.extend((one, pool.submit(work, one)) for one in islice(todo, count))

        submit(2 * threads)
        while submitted:
            one, result = submitted.popleft()
            yield one, result.result()
            submit(1)


def _unit(matrix: Matrix, axis: int, batch: int) -> tuple[int, int]:
    """Return the shape of the parts in which a matrix is read: chunks, or rows of large chunks."""
    (height, width), layout = matrix.layout.read_chunk, matrix.layout
    if (height, width) == (1, 1):
        return (max(1, batch // COLUMNS), COLUMNS) if axis == 0 else (1, batch)
    return (max(1, min(height, batch // width)), width) if layout.partial_reads else (height, width)


class Moments:
    """Sums over blocks of an array, per column or row. `m2` are sums of squared differences from the mean."""

    def __init__(self, extent: int) -> None:
        self.count, self.missing = (np.zeros(extent, np.int64) for _ in range(2))
        self.total, self.m2 = np.zeros(extent), np.zeros(extent)
        self.min, self.max = np.full(extent, np.inf), np.full(extent, -np.inf)

    def add(self, at: slice, other: "Moments") -> None:
        """Add the sums of another block, which has the columns (or rows) `at` of this one."""
        if not self.count[at].any():
            for name in ("count", "total", "m2", "min", "max"):
                getattr(self, name)[at] = getattr(other, name)
            self.missing[at] += other.missing
            return
        with np.errstate(all="ignore"):
            ours, theirs = self.count[at], other.count
            both = ours + theirs
            apart = self.total[at] / np.maximum(ours, 1) - other.total / np.maximum(theirs, 1)
            weight = ours * (theirs / np.maximum(both, 1))
            self.m2[at] += other.m2 + np.where(weight > 0, apart * apart * weight, 0)
            self.total[at] += other.total
            np.minimum(self.min[at], other.min, out=self.min[at])
            np.maximum(self.max[at], other.max, out=self.max[at])
        self.count[at] = both
        self.missing[at] += other.missing

    def finished(self) -> tuple[Array, Array, Array, Array]:
        """Return means, variances, minima and maxima; NaN where all elements are missing."""
        some = self.count > 0
        mean, variance, low, high = (
            np.where(some, x, np.nan)
            for x in (
                self.total / np.maximum(self.count, 1),
                self.m2 / np.maximum(self.count, 1),
                self.min,
                self.max,
            )
        )
        # The mean of equal elements may be rounded, and their variance is 0 all the same.
        variance = np.where((low == high) & np.isfinite(low), 0.0, variance)
        return mean, variance, low, high


def entry_moments(matrix: Matrix, axis: int, code: float | None, log1p: bool, memory: int) -> Moments | None:
    """Return the moments of a sparse matrix along an axis, from its entries; None if this is not possible.

    The other arguments are those of `moments` and `reduced`.
    """
    view = chain_of(matrix)
    source = matrix if view is None else view.source
    steps = () if view is None else view.steps
    numbers = () if view is None else view.numbers
    rounds = view is not None and view.steps and view.dtype != np.float64
    plain = {step.kind for step in steps} <= _KEEPS_ZEROS and source.dtype.kind != "c"
    if not isinstance(source, Listed) or numbers is None or rounds or not plain:
        return None
    pieces = source.entries(ENTRIES)
    if pieces is None:
        return None
    each = source.layout.decode_bytes + ENTRIES * ENTRY_BYTES + 96 * source.shape[1 - axis]
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), memory // each))

    def work(piece: Piece) -> Moments:
        try:
            rows, cols, values = piece.read()
        except Exception as error:  # a store may raise any exception
            raise ExecutionError(failure("reading", source, piece.rows, piece.cols, error)) from error
        x = in_float64(values)
        with np.errstate(all="ignore"):
            for step, u in zip(steps, numbers, strict=True):
                if step.kind in _SCALING:
                    x *= np.asarray(u)[rows if step.axis == "rows" else cols]
                else:
                    np.log1p(x, out=x)
            first, end = (piece.cols, piece.rows)[axis]
            return _of_entries((cols, rows)[axis], x, (first, end), code, log1p)

    found = Moments(matrix.shape[1 - axis])
    for piece, part in _in_order(pieces, work, threads):
        found.add(slice(*(piece.cols, piece.rows)[axis]), part)
    zeros, rest = Moments(len(found.count)), matrix.shape[axis] - found.count - found.missing
    if code == 0:
        zeros.missing = rest
    else:
        zeros.count = rest
        zeros.min[rest > 0] = zeros.max[rest > 0] = 0
    found.add(slice(None), zeros)
    return found


def _of_entries(groups: Array, x: Array, span: Range, code: float | None, log1p: bool) -> Moments:
    """Return the moments of groups of elements `x`, in float64, which are overwritten.

    Element i is in group `groups[i]`, a number in `span`.
    """
    found = Moments(span[1] - span[0])
    if groups.dtype.kind == "u" or groups.dtype.itemsize < 4:
        groups = groups.astype(np.int64)
    if span[0]:
        groups = groups - span[0]
    if code is not None and (absent := is_missing(x, code)).any():
        found.missing = _counts(groups[absent], len(found.count))
        groups, x = groups[~absent], x[~absent]
    if log1p:
        np.log1p(x, out=x)
    library = compiled()
    if library is not None and groups.dtype.isnative:
        groups = np.ascontiguousarray(groups)
        given = (groups, x, found.count, found.total, found.m2, found.min, found.max)
        sizes = ctypes.c_int(groups.itemsize), ctypes.c_int64(len(x)), ctypes.c_int64(len(found.count))
        wrong = library.ooc_moments(*sizes, *(ctypes.c_void_p(array.ctypes.data) for array in given))
        assert not wrong, "an element is in no group"
        return found
    found.count = _counts(groups, len(found.count))
    found.total += np.bincount(groups, x, len(found.count))
    np.minimum.at(found.min, groups, x)
    np.maximum.at(found.max, groups, x)
    x -= (found.total / np.maximum(found.count, 1))[groups]
    x *= x
    found.m2 += np.bincount(groups, x, len(found.count))
    return found


def _counts(groups: Array, extent: int) -> Array:
    return np.bincount(groups, minlength=extent)


def moments(raw: Array, axis: int, code: float | None, log1p: bool, *, extremes: bool = True) -> Moments:
    """Return the moments of a block along an axis. `code` stands for missing elements, which are left out.

    Without `extremes`, `min` and `max` may only tell whether all elements are equal. They are then infinite
    where elements differ.
    """
    if raw.dtype == np.int8 and not log1p:
        return _of_int8(raw, axis, code)
    if axis == 1 and not (extremes or log1p) and code is None and 0 < raw.shape[1] <= ROWS_SLAB:
        return _of_rows(raw)
    found = Moments(raw.shape[1 - axis])
    for block, at in _slabs(raw.shape, SLAB, SLAB, axis):
        found.add(at, _of_floats(in_float64(raw[block]), axis, code, log1p))
    return found


def _slabs(
    shape: tuple[int, int], elements: int, rows: int, axis: int
) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """Cut a block into slabs of at most `elements` elements and `rows` rows.

    Yield each slab, and its range of columns, or of rows if `axis` is 1.
    """
    width = min(shape[1], elements)
    height = min(rows, max(1, elements // width))
    for top in range(0, shape[0], height):
        for left in range(0, shape[1], width):
            block = slice(top, min(top + height, shape[0])), slice(left, min(left + width, shape[1]))
            yield block, block[1 - axis]


def _of_floats(x: Array, axis: int, code: float | None, log1p: bool) -> Moments:
    """Return the sums of a slab of float64 elements, which is overwritten."""
    found, absent = Moments(0), None if code is None else is_missing(x, code)
    shape = (1, -1) if axis == 0 else (-1, 1)
    with np.errstate(all="ignore"):
        if log1p:
            np.log1p(x, out=x)
        low = high = x
        found.missing = np.zeros(x.shape[1 - axis], np.int64)
        lost: tuple[Array, ...] = ()
        if absent is not None and absent.any():
            found.missing, lost = np.count_nonzero(absent, axis), positions(absent)
            low, high = x.copy(), x.copy()
            low[lost], high[lost], x[lost] = np.inf, -np.inf, 0
        found.count = x.shape[axis] - found.missing
        found.min, found.max, found.total = low.min(axis), high.max(axis), x.sum(axis)
        x -= (found.total / np.maximum(found.count, 1)).reshape(shape)
        if lost:
            x[lost] = 0
        x *= x
        found.m2 = x.sum(axis)
    return found


def _of_rows(raw: Array) -> Moments:
    """Return the sums of whole rows without missing elements, and extremes where all elements may be equal.

    It makes few calls of NumPy, since in each of them a thread may wait for the GIL.
    """
    rows, count = raw.shape
    found, mean = Moments(rows), np.empty(rows)
    height = max(1, ROWS_SLAB // count)
    with np.errstate(all="ignore"):
        for top in range(0, rows, height):
            part = slice(top, top + height)
            x = in_float64(raw[part])
            np.add.reduce(x, 1, out=found.total[part])
            np.divide(found.total[part], count, out=mean[part])
            x -= mean[part, None]
            np.einsum("ij,ij->i", x, x, out=found.m2[part])
        # The mean of equal elements has at most this rounding error.
        error = count * np.finfo(np.float64).eps * np.abs(mean)
        equal = np.flatnonzero(found.m2 <= count * error * error)
    found.count.fill(count)
    found.min.fill(-np.inf)
    found.max.fill(np.inf)
    if equal.size:
        found.min[equal], found.max[equal] = raw[equal].min(1), raw[equal].max(1)
    return found


def _of_int8(raw: Array, axis: int, code: float | None) -> Moments:
    """Return the sums of a block of int8 elements, ten times as fast as in float64.

    Sums of squares of `INT8_DEPTH` elements are exact in float32.
    """
    extent = raw.shape[1 - axis]
    found, squares = Moments(extent), np.zeros(extent)
    # Allocated once: page faults of temporary arrays for each slab take longer than the arithmetic.
    dtypes, size = (np.float32, np.int8, np.int8, np.int8), min(INT8_SLAB, raw.size)
    scratch: list[Array] = [np.empty(size, dtype) for dtype in dtypes]
    for block, at in _slabs(raw.shape, INT8_SLAB, INT8_DEPTH, axis):
        low = high = x = raw[block]
        wide, bits, kept, end = (each[: x.size].reshape(x.shape) for each in scratch)
        missing = code is not None and np.equal(x, np.int8(code), out=bits.view(bool)).any()
        if missing:
            np.copyto(wide, bits)
            found.missing[at] += _added(wide, axis).astype(np.int64)
            # Operations on bits, because those with a mask take ten times as long.
            np.negative(bits, out=bits)
            np.bitwise_and(x, np.invert(bits, out=kept), out=kept)
            x = kept
            low = np.bitwise_or(x, np.bitwise_and(bits, np.int8(127), out=end), out=end)
        np.minimum(found.min[at], low.min(axis), out=found.min[at])
        if missing:
            high = np.bitwise_or(x, np.bitwise_and(bits, np.int8(-128), out=end), out=end)
        np.maximum(found.max[at], high.max(axis), out=found.max[at])
        np.copyto(wide, x)
        found.total[at] += _added(wide, axis)
        wide *= wide
        squares[at] += _added(wide, axis)
    found.count = raw.shape[axis] - found.missing
    none = found.count == 0
    found.min[none], found.max[none] = np.inf, -np.inf
    # Sums of differences from the integer nearest to the mean: they are exact, and do not cancel.
    near = np.rint(found.total / np.maximum(found.count, 1))
    total = found.total - near * found.count
    squares += near * (near * found.count - 2 * found.total)
    found.m2 = squares - total * (total / np.maximum(found.count, 1))
    return found


def _added(x: Array, axis: int) -> Array:
    """Return exact sums of float32 elements that are squares of int8, along an axis."""
    if axis == 0:  # `_slabs` has cut it to INT8_DEPTH
        return np.asarray(x.sum(0))
    return np.asarray(np.add.reduceat(x, range(0, x.shape[1], INT8_DEPTH), axis=1).sum(1, dtype=np.float64))
