"""Compute inner products and distances of selected pairs of rows, from rows that are read again.

Sums are in float64, and added up in an order that depends on the number of columns alone.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from oocgemm.integrity.passes import Oriented
from oocgemm.integrity.samples import read
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array

# Maximum number of columns that are read at a time, and of products of elements that are computed at a time.
DEPTH, PRODUCTS = 1 << 14, 1 << 20
# Rows in the same range of this many rows are read together, if chunks have fewer rows.
BAND = 32


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


def squared_distances(
    left: Oriented, right: Oriented, rows: Array, cols: Array, memory: int, threads: int
) -> Array:
    """Return the squared distance of each pair of rows (`blocks`), to about the precision of float64."""
    found = np.zeros(len(rows))
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-pairs") as pool:
        for block in blocks(left, right, rows, cols, memory, lambda: None):
            step = max(1, PRODUCTS // (4 * max(1, block.x.shape[1])))

            def add(start: int, block: PairBlock = block, step: int = step) -> None:
                here = slice(start, start + step)
                apart = block.x[block.x_at[here]]
                apart -= block.y[block.y_at[here]]
                found[block.at[here]] += np.einsum("pk,pk->p", apart, apart)

            list(pool.map(add, range(0, len(block.at), step)))
    return found


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
    for part in _runs(lines // max(BAND, x.chunk[0])):
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
