"""Compute inner products and distances of selected pairs of rows, from rows that are read again.

Sums are in float64, and added up in an order that depends on the number of columns alone. Distances are
computed by compiled code (`kernels/host/distances.c`), or else by NumPy, with other rounding errors.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from oocgemm import stores
from oocgemm.integrity.passes import Oriented
from oocgemm.integrity.samples import read
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array
from oocgemm.system.installed import compiled

# Maximum number of columns that are read at a time, and of products of elements that are computed at a time.
DEPTH, PRODUCTS = 1 << 14, 1 << 20
# Maximum number of pairs of a part of rows in memory. Threads compute the distances of different parts.
PART = 1 << 17
# Rows in the same range of BAND rows are read together, if chunks have fewer rows. If most rows are read, the
# range has DENSE_BAND rows.
BAND, DENSE_BAND = 32, 1024
# Numbers of dtypes of elements in kernels/host/host.h.
DTYPES = {"float32": 0, "float64": 1, "int8": 2}


class _Pairs(ctypes.Structure):
    """struct ooc_pairs of kernels/host/host.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_ssize_t) for name in ("x_pitch", "y_pitch")),
        *((name, ctypes.c_void_p) for name in ("x_scales", "y_scales", "x_at", "y_at")),
        *((name, ctypes.c_size_t) for name in ("each", "count", "width")),
        ("dtype", ctypes.c_int),
    )


class ScaledRows(NamedTuple):
    """The rows of a matrix, times a number per row. Without `scales`, the numbers are 1."""

    matrix: Oriented
    scales: Array | None = None


class PairBlock(NamedTuple):
    """Pairs whose rows are in memory together, in a range of columns.

    Pair number `at[i]` is that of row `x_at[i]` of x and row `y_at[i]` of y.
    """

    at: Array
    x: Array
    y: Array
    x_at: Array
    y_at: Array


def blocks(
    left: Oriented, right: Oriented, rows: Array, cols: Array, memory: int, report: Callable[[], None]
) -> Iterator[PairBlock]:
    """Yield all pairs of a row `rows[i]` of `left` and a row `cols[i]` of `right`, in about `memory` bytes.

    `rows` is ascending. The columns of a pair are yielded in ascending order. `report` is called often.
    """
    depth = left.shape[1]
    width = max(1, min(DEPTH, depth))
    lines = max(1, memory // (16 * width))  # of each matrix
    order = np.argsort(cols // lines, kind="stable")
    for part in _runs(cols[order] // lines):
        for inner in _runs(rows[order[part]] // lines):
            at = order[part][inner]
            (xs, x_at), (ys, y_at) = _unique(rows[at]), _unique(cols[at])
            for start in range(0, depth, width):
                report()
                span = start, min(depth, start + width)
                yield PairBlock(at, _lines(left, xs, span), _lines(right, ys, span), x_at, y_at)


def cosines(
    left: Oriented, right: Oriented, rows: Array, cols: Array, memory: int, report: Callable[[], None]
) -> Array:
    """Return the cosine of each pair of rows (`blocks`). Those of equal rows are exactly 1."""
    sums, x_squares, y_squares = (np.zeros(len(rows)) for _ in range(3))
    for block in blocks(left, right, rows, cols, memory, report):
        for of_pair, of_line, lines, inside in (
            (x_squares, block.x, len(block.x), block.x_at),
            (y_squares, block.y, len(block.y), block.y_at),
        ):
            squares = np.zeros(lines)
            _add(squares, of_line, of_line, np.arange(lines), np.arange(lines))
            of_pair[block.at] += squares[inside]
        part = sums[block.at]
        _add(part, block.x, block.y, block.x_at, block.y_at)
        sums[block.at] = part
    return _divided(sums, x_squares, y_squares)


def squared_distances(x: ScaledRows, y: ScaledRows, rows: Array, cols: Array, memory: int) -> Array:
    """Return the squared distance of row ``rows[i]`` of x and row ``cols[i, j]`` of y, for each i and j.

    Rows that are not in memory, or not in a dtype of `DTYPES`, are read in about `memory` bytes (`blocks`).
    """
    if (there := distances_in_memory(x, y, rows, cols)) is not None:
        return there
    found = np.zeros(cols.shape)
    flat, lines = found.ravel(), np.repeat(rows, cols.shape[1])
    for block in blocks(x.matrix, y.matrix, lines, cols.ravel(), memory, lambda: None):
        first, second = (
            None if of.scales is None else _of_lines(of.scales, numbers[block.at], at, len(array))
            for of, numbers, at, array in (
                (x, lines, block.x_at, block.x),
                (y, cols.ravel(), block.y_at, block.y),
            )
        )
        part = flat[block.at]
        _add_distances((block.x, block.y), (first, second), block.x_at, block.y_at[:, None], part)
        flat[block.at] = part
    return found


def distances_in_memory(x: ScaledRows, y: ScaledRows, rows: Array, cols: Array) -> Array | None:
    """Return what `squared_distances` does; None if compiled code cannot address the rows of x and y."""
    if (arrays := _in_memory(x, y)) is None:
        return None
    found = np.zeros(cols.shape)
    for start in range(0, arrays[0].shape[1], DEPTH):
        span = np.s_[:, start : start + DEPTH]
        _add_distances((arrays[0][span], arrays[1][span]), (x.scales, y.scales), rows, cols, found)
    return found


def sort_candidates(distances: Array, indices: Array) -> None:
    """Sort the candidates of each row in place: by distances, NaN last, and equal ones by indices.

    Both arrays are contiguous, of float64 and int64.
    """
    if (library := compiled()) is None:
        order = np.lexsort((indices, distances))
        distances[...] = np.take_along_axis(distances, order, 1)
        indices[...] = np.take_along_axis(indices, order, 1)
        return
    sizes = map(ctypes.c_size_t, (*distances.shape, _threads(distances.size)))
    addresses = map(ctypes.c_void_p, (distances.ctypes.data, indices.ctypes.data))
    if library.ooc_sort_candidates(*addresses, *sizes):
        raise MemoryError


def parts_of(x: ScaledRows, y: ScaledRows, rows: int, pairs: int) -> list[slice]:
    """Return the parts of rows with `pairs` pairs each for which threads should call `squared_distances`.

    If rows are read, all pairs are one part: rows are then read once for them.
    """
    if _in_memory(x, y) is None:
        return [slice(0, rows)]
    height = max(1, PART // max(1, pairs))
    return [slice(top, top + height) for top in range(0, rows, height)]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads(pairs: int) -> int:
    """Return how many threads work on so many pairs. There may be other threads like the caller."""
    return cores() if pairs > PART else 1


def _in_memory(x: ScaledRows, y: ScaledRows) -> tuple[Array, Array] | None:
    """Return the rows of two matrices in memory; None if compiled code cannot address both."""
    first, second = _elements(x.matrix), _elements(y.matrix)
    if first is None or second is None or first.dtype != second.dtype:
        return None
    return first, second


def _elements(x: Oriented) -> Array | None:
    """Return the rows of a matrix in memory; None if compiled code cannot address them."""
    array = stores.in_memory(x.matrix)
    if array is None or compiled() is None or array.dtype.name not in DTYPES:
        return None
    array = array.T if x.swapped else array
    plain = array.dtype.isnative and array.flags.aligned
    return array if plain and (array.strides[1] == array.itemsize or array.shape[1] <= 1) else None


def _of_lines(scales: Array, numbers: Array, at: Array, count: int) -> Array:
    """Return the scales of the lines of a block. Pair i is of line `numbers[i]`, number `at[i]` in it."""
    found = np.empty(count)
    found[at] = scales[numbers]
    return found


def _add_distances(
    arrays: tuple[Array, Array],
    scales: tuple[Array | None, Array | None],
    rows: Array,
    cols: Array,
    sums: Array,
) -> None:
    """Add the squared distances of row rows[i] of an array and row cols[i, j] of another one to `sums`."""
    x, y = arrays
    if (library := compiled()) is not None:
        numbers = [np.ascontiguousarray(each, np.int64) for each in (rows, cols)]
        factors = [None if each is None else np.ascontiguousarray(each, np.float64) for each in scales]
        given = _Pairs(
            *(x.ctypes.data, y.ctypes.data, x.strides[0], y.strides[0]),
            *(None if each is None else each.ctypes.data for each in factors),
            *(each.ctypes.data for each in numbers),
            *(max(1, cols.shape[1]), cols.size, x.shape[1], DTYPES[x.dtype.name]),
        )
        library.ooc_add_distances(
            ctypes.byref(given), ctypes.c_void_p(sums.ctypes.data), ctypes.c_size_t(_threads(cols.size))
        )
        return
    step, flat = max(1, PRODUCTS // (4 * max(1, x.shape[1]))), sums.ravel()
    lines, others = np.repeat(rows, cols.shape[1]), cols.ravel()

    def add(start: int) -> None:
        here = slice(start, start + step)
        left, right = (
            array[at[here]] if of is None else array[at[here]] * of[at[here], None]
            for array, of, at in ((x, scales[0], lines), (y, scales[1], others))
        )
        left -= right
        flat[here] += np.einsum("pk,pk->p", left, left)

    with ThreadPoolExecutor(cores(), thread_name_prefix="oocgemm-pairs") as pool:
        list(pool.map(add, range(0, len(flat), step)))


def _unique(numbers: Array) -> tuple[Array, Array]:
    """Return what `np.unique` does of numbers in a small range, with inverse indices, without sorting."""
    least = numbers.min()
    present = np.zeros(numbers.max() - least + 1, bool)
    present[numbers - least] = True
    return np.flatnonzero(present) + least, (np.cumsum(present) - 1)[numbers - least]


def _runs(numbers: Array) -> Iterator[slice]:
    """Yield the parts of an array in which all numbers are equal."""
    ends = np.flatnonzero(np.diff(numbers)) + 1
    yield from map(slice, [0, *ends], [*ends, len(numbers)])


def _lines(x: Oriented, lines: Array, span: Range) -> Array:
    """Return some rows of a matrix in the columns `span`, in float64. Rows of a chunk are read together."""
    found = np.empty((len(lines), span[1] - span[0]))
    dense = 2 * len(lines) > lines[-1] - lines[0]
    for part in _runs(lines // max(DENSE_BAND if dense else BAND, x.chunk[0])):
        inside = lines[part]
        block = read(x, (int(inside[0]), int(inside[-1]) + 1), span, wide=False)
        found[part] = block[inside - inside[0]]
    return found


def _add(sums: Array, x: Array, y: Array, x_at: Array, y_at: Array) -> None:
    """Add the inner products of rows of x and y. Their bits do not depend on the number of rows."""
    step = max(1, PRODUCTS // x.shape[1])
    for start in range(0, len(sums), step):
        here = slice(start, start + step)
        sums[here] += np.einsum("pk,pk->p", x[x_at[here]], y[y_at[here]])


def _divided(sums: Array, x_squares: Array, y_squares: Array) -> Array:
    """Return inner products divided by the norms of rows, exactly 1 for equal rows, and 0 for zero rows."""
    (x, x_exponent), (y, y_exponent) = np.frexp(x_squares), np.frexp(y_squares)
    exponent = x_exponent + y_exponent
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = np.ldexp(sums, -(exponent // 2)) / np.sqrt(np.ldexp(x * y, exponent % 2))
    return np.asarray(np.clip(np.where((x_squares > 0) & (y_squares > 0), cosines, 0), -1, 1))
