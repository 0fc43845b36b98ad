"""Statistics of the rows or columns of an array, in one pass over it."""

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.options import Operand, Size
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import parse_size
from oocgemm.stores import BATCH_BYTES, Array, Matrix, pieces
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import SLAB, is_missing
from oocgemm.system import cache
from oocgemm.system.memory import available_memory

# Maximum numbers of threads of a pass, in all and per core. With two per core, one computes while the other
# reads from the disk.
MAX_THREADS, THREADS_PER_CORE = 16, 2
# Columns of the blocks in which an array without chunks is read for statistics of columns.
COLUMNS = 1 << 12
# Elements of a slab of int8, and how many of them are added at most: squares up to 2^14 give sums up to 2^24.
INT8_SLAB, INT8_DEPTH = 1 << 19, 1 << 10
# Temporary bytes for a slab: about 40 per element in float64, 16 per element of int8.
SCRATCH = max(SLAB * 40, INT8_SLAB * 16)
# Number of results that the cache keeps, and the version of their format and of their arithmetic.
MAX_CACHED, VERSION = 32, 1


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics per column or per row of an array, each an array with one number for each of them.

    Attributes:
        count: number of elements that are not missing.
        missing: number of missing elements.
        mean, variance: of the elements that are not missing, with the divisor `count`; NaN if there are none.
        min, max: extremes of these elements; NaN if there are none.
    """

    count: Array
    missing: Array
    mean: Array
    variance: Array
    min: Array
    max: Array

    @property
    def std(self) -> Array:
        """Standard deviations: the square roots of the variances."""
        return np.asarray(np.sqrt(self.variance))


def stats(
    x: Operand,
    axis: int = 0,
    *,
    missing: float | None = None,
    log1p: bool = False,
    host_memory: Size | None = None,
) -> Stats:
    """Compute statistics of the columns or rows of an array in one pass over it, in bounded memory.

    `Transform` takes its means and standard deviations from here. The result for files is cached, with the
    fingerprint of the files (sizes, modification times), in the folder of `oocgemm info`'s calibrations.

    Args:
        x: a two-dimensional operand as for `gemm`; also int32 or int64. Not complex.
        axis: the axis that is reduced, as in NumPy: 0 (default) for one number per column, which
            ``gram(x)`` needs, or 1 for one number per row.
        missing: code of missing elements, such as -1 or NaN, which are left out.
        log1p: of log(1 + x) in place of x.
        host_memory: upper bound on memory, in bytes or as "2GiB"; half of the available RAM by default. The
            result is not counted, 48 bytes per column or row.

    Returns:
        The `Stats`. They do not depend on the memory or on the number of threads. Sums of integers are exact
            up to 2^53. Variances are merged from those of blocks by the formula of Chan, Golub and LeVeque
            (1983), which does not cancel.

    Raises:
        InputError: the operand cannot be used.
        ExecutionError: it cannot be read.

    >>> import oocgemm
    >>> oocgemm.stats([[1.0, 2.0], [3.0, 6.0]]).mean
    array([2., 4.])
    """
    if isinstance(axis, bool) or axis not in (0, 1):
        raise InputError(f"axis = {axis!r}: pass 0 for statistics of the columns, or 1 for those of the rows")
    matrix = stores.open_matrix("X", stores.located("X", x))
    transform = Transform(missing=missing, log1p=log1p)
    transform.result("X", matrix.dtype)  # refuses complex operands
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    return stats_of(matrix, axis, transform, memory)


def stats_of(matrix: Matrix, axis: int, transform: Transform, memory: int) -> Stats:
    """Return the statistics of an open matrix along `axis`, from the cache or by a pass in `memory` bytes.

    Of `transform`, only the code of missing elements and `log1p` matter.
    """
    code = transform.code(matrix.name, matrix.dtype)
    place = _place(matrix, axis, code, transform.log1p)
    found = None if place is None else _load(place, matrix.shape[1 - axis])
    if found is None:
        found = _computed(matrix, axis, code, transform.log1p, memory)
        if place is not None:
            _save(place, found)
    return found


class _Sums:
    """Sums over blocks of an array, per column or row. `m2` are sums of squared differences from the mean."""

    def __init__(self, extent: int) -> None:
        self.count, self.missing = (np.zeros(extent, np.int64) for _ in range(2))
        self.total, self.m2 = np.zeros(extent), np.zeros(extent)
        self.min, self.max = np.full(extent, np.inf), np.full(extent, -np.inf)

    def add(self, at: slice, other: "_Sums") -> None:
        """Add the sums of another block, which has the columns (or rows) `at` of this one."""
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

    def stats(self) -> Stats:
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
        return Stats(self.count, self.missing, mean, variance, low, high)


def _computed(matrix: Matrix, axis: int, code: float | None, log1p: bool, memory: int) -> Stats:
    unit = _unit(matrix, axis)
    batch = max(1, BATCH_BYTES // matrix.dtype.itemsize)
    piece = max(unit[0] * unit[1], 2 * batch) * matrix.dtype.itemsize
    # Twice as many pieces as threads are begun, and the sums of a piece may be larger than the piece.
    each = matrix.layout.decode_bytes + 2 * piece + SCRATCH + 12 * 8 * max(unit[1 - axis], batch)
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(MAX_THREADS, THREADS_PER_CORE * cores, memory // each))
    found, begun = _Sums(matrix.shape[1 - axis]), deque[tuple[Range, Future[_Sums]]]()
    todo = pieces((0, matrix.shape[0]), (0, matrix.shape[1]), unit, batch)
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-stats") as pool:

        def begin() -> Iterator[None]:
            for rows, cols in todo:
                work = pool.submit(_sums_of, matrix, rows, cols, axis, code, log1p)
                begun.append((cols if axis == 0 else rows, work))
                yield

        started = begin()
        for _ in range(2 * threads):
            next(started, None)
        # The order in which sums are added does not depend on the threads, so that the result is always the
        # same.
        while begun:
            span, work = begun.popleft()
            found.add(slice(*span), work.result())
            next(started, None)
    return found.stats()


def _unit(matrix: Matrix, axis: int) -> tuple[int, int]:
    """Return the shape of the parts in which a matrix is read: chunks, or rows of large chunks."""
    (height, width), layout = matrix.layout.read_chunk, matrix.layout
    batch = max(1, BATCH_BYTES // matrix.dtype.itemsize)
    if (height, width) == (1, 1):
        return (max(1, batch // COLUMNS), COLUMNS) if axis == 0 else (1, batch)
    return (max(1, min(height, batch // width)), width) if layout.partial_reads else (height, width)


def _sums_of(matrix: Matrix, rows: Range, cols: Range, axis: int, code: float | None, log1p: bool) -> _Sums:
    raw = np.empty((rows[1] - rows[0], cols[1] - cols[0]), matrix.dtype)
    try:
        matrix.read(rows, cols, raw)
    except Exception as error:  # a store may raise any exception
        what = str(error) if isinstance(error, ExecutionError) else f"{type(error).__name__}: {error}"
        raise ExecutionError(
            f"reading {matrix.name}[{rows[0]}:{rows[1]}, {cols[0]}:{cols[1]}]: {what}"
        ) from error
    if matrix.dtype == np.int8 and not log1p:
        return _of_int8(raw, axis, code)
    found = _Sums(raw.shape[1 - axis])
    for block, at in _slabs(raw.shape, SLAB, SLAB, axis):
        found.add(at, _of_floats(raw[block].astype(np.float64), axis, code, log1p))
    return found


def _slabs(
    shape: tuple[int, int], elements: int, rows: int, axis: int
) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """Cut a block into slabs of at most `elements` elements and `rows` rows.

    Yield each with the range of columns, or for axis 1 of rows, that it has.
    """
    width = min(shape[1], elements)
    height = min(rows, max(1, elements // width))
    for top in range(0, shape[0], height):
        for left in range(0, shape[1], width):
            block = slice(top, min(top + height, shape[0])), slice(left, min(left + width, shape[1]))
            yield block, block[1 - axis]


def _of_floats(x: Array, axis: int, code: float | None, log1p: bool) -> _Sums:
    """Return the sums of a slab of float64 elements, which is overwritten."""
    found, absent = _Sums(0), is_missing(x, code)
    shape = (1, -1) if axis == 0 else (-1, 1)
    with np.errstate(all="ignore"):
        if log1p:
            np.log1p(x, out=x)
        low = high = x
        found.missing = np.zeros(x.shape[1 - axis], np.int64)
        lost: tuple[Array, ...] = ()
        if absent is not None and absent.any():
            found.missing, lost = np.count_nonzero(absent, axis), np.nonzero(absent)
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


def _of_int8(raw: Array, axis: int, code: float | None) -> _Sums:
    """Return the sums of a block of int8 elements, ten times as fast as in float64.

    Sums of squares of `INT8_DEPTH` elements are exact in float32.
    """
    extent = raw.shape[1 - axis]
    found, squares = _Sums(extent), np.zeros(extent)
    for block, at in _slabs(raw.shape, INT8_SLAB, INT8_DEPTH, axis):
        low = high = x = raw[block]
        if code is not None and (absent := x == np.int8(code)).any():
            found.missing[at] += absent.astype(np.float32).sum(axis).astype(np.int64)
            # Operations on bits, because those with a mask take ten times as long.
            bits = -absent.view(np.int8)
            low, high, x = x ^ ((x ^ 127) & bits), x ^ ((x ^ -128) & bits), x & ~bits
        wide = x.astype(np.float32)
        found.total[at] += _added(wide, axis)
        wide *= wide
        squares[at] += _added(wide, axis)
        np.minimum(found.min[at], low.min(axis), out=found.min[at])
        np.maximum(found.max[at], high.max(axis), out=found.max[at])
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


def _place(matrix: Matrix, axis: int, code: float | None, log1p: bool) -> Path | None:
    """Return the path of the cached statistics; None if changes of the matrix could not be detected."""
    known = matrix.fingerprint()
    if known is None or not known.get("content"):
        return None
    key = json.dumps([VERSION, known, axis, repr(code), log1p], sort_keys=True, default=str)
    with suppress(InputError):  # without a home directory there is no cache
        return cache.folder() / "stats" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    return None


def _load(place: Path, extent: int) -> Stats | None:
    with suppress(OSError, ValueError, KeyError), np.load(place, allow_pickle=False) as file:
        found = Stats(**{field.name: file[field.name] for field in fields(Stats)})
        if all(getattr(found, field.name).shape == (extent,) for field in fields(Stats)):
            os.utime(place)
            return found
    return None


def _save(place: Path, found: Stats) -> None:
    """Save statistics, and remove the oldest ones of other arrays if there are too many."""
    file, named = io.BytesIO(), {field.name: getattr(found, field.name) for field in fields(Stats)}
    np.savez(file, **named)
    with suppress(OSError):  # without the cache, later runs make a pass again
        cache.write_whole(place, file.getvalue())
        kept: list[Any] = sorted(place.parent.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-MAX_CACHED]:
            path.unlink(missing_ok=True)
