"""Compute cosines again that are so near to a threshold that rounding errors could decide on them.

A run keeps all pairs whose computed cosine is at least the threshold less a margin (`Selection.margin`).
After the run, those within the margin are computed in float64 from the operands, and compared with the
threshold. The sums of a pair are added up in an order that depends on the number of columns alone. So equal
rows have the cosine 1.
"""

from collections.abc import Callable, Iterator

import numpy as np

from oocgemm.integrity.passes import Oriented
from oocgemm.integrity.samples import read
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.sampling import reading_again
from oocgemm.jobs.transforms import memory_of
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Collecting, Matrix
from oocgemm.stores.base import Retries
from oocgemm.stores.transformed import StandardizedMatrix
from oocgemm.system.threads import Cancel

# Columns of the rows that are multiplied at a time, and maximum number of products.
DEPTH, PRODUCTS = 1 << 14, 1 << 20
# Rows that are read together if chunks have fewer.
BAND = 32


def settle(job: PreparedRun, found: Collecting, retries: Retries, cancel: Cancel) -> None:
    """Decide on the pairs within the margin of the threshold.

    Reads that were tried again are added to `retries`. Raises `ExecutionError` if an operand cannot be read,
    and the error of `cancel`.
    """
    problem, selection = job.plan.problem, job.request.selection
    assert selection is not None
    near = selection.margin(problem)
    if not near:
        return
    starts, cols, scores = found.csr()
    sizes = np.abs(scores) if selection.absolute else scores
    at = np.flatnonzero(sizes <= selection.threshold + near)
    if not at.size:
        return
    rows = np.searchsorted(starts, at, side="right") - 1
    exact, mirrored = np.empty(at.size), np.zeros(at.size, bool)
    if problem.cover.square:  # a pair is computed once
        mirrored = cols[at] > rows
    once = np.flatnonzero(~mirrored)
    left, right = (
        Oriented(_in_float64(x), swapped, retries=retries)
        for x, swapped in ((job.a, problem.trans_a.swaps), (job.b, not problem.trans_b.swaps))
    )
    with reading_again(retries, cancel) as check_cancelled:
        memory = memory_of(job.request) // 4
        exact[once] = _cosines(left, right, rows[once], cols[at[once]], memory, check_cancelled)
    if mirrored.any():
        again = np.flatnonzero(mirrored)
        pairs = np.flatnonzero(~mirrored & (cols[at] != rows))
        exact[again[np.lexsort((rows[again], cols[at[again]]))]] = exact[pairs]
    least = (np.abs(exact) if selection.absolute else exact) >= selection.threshold
    found.settle(at, exact, least)


def _in_float64(matrix: Matrix) -> Matrix:
    """Return an operand before its elements are rounded to the dtype in which they are multiplied."""
    return matrix.wide() if isinstance(matrix, StandardizedMatrix) else matrix


def _cosines(
    left: Oriented, right: Oriented, rows: Array, cols: Array, memory: int, report: Callable[[], None]
) -> Array:
    """Return the cosines of pairs of rows of two matrices, in about `memory` bytes.

    The numbers of rows of `left` are ascending. `report` is called often.
    """
    depth = left.shape[1]
    width = max(1, min(DEPTH, depth))
    lines = max(1, memory // (16 * width))  # of each matrix
    found = np.empty(len(rows))
    order = np.argsort(cols // lines, kind="stable")
    for part in _runs(cols[order] // lines):
        for inner in _runs(rows[order[part]] // lines):
            at = order[part][inner]
            (xs, x_at), (ys, y_at) = (np.unique(each[at], return_inverse=True) for each in (rows, cols))
            sums, x_squares, y_squares = np.zeros(len(at)), np.zeros(len(xs)), np.zeros(len(ys))
            for start in range(0, depth, width):
                report()
                span = start, min(depth, start + width)
                x, y = _lines(left, xs, span), _lines(right, ys, span)
                _add(x_squares, x, x, np.arange(len(xs)), np.arange(len(xs)))
                _add(y_squares, y, y, np.arange(len(ys)), np.arange(len(ys)))
                _add(sums, x, y, x_at, y_at)
            found[at] = _divided(sums, x_squares[x_at], y_squares[y_at])
    return found


def _runs(numbers: Array) -> Iterator[slice]:
    """Yield the parts of an array in which all numbers are equal."""
    ends = np.flatnonzero(np.diff(numbers)) + 1
    yield from map(slice, [0, *ends], [*ends, len(numbers)])


def _lines(x: Oriented, lines: Array, span: Range) -> Array:
    """Return the elements of some rows of a matrix in the columns `span`, in float64.

    Rows in the same chunk, or in a band of `BAND` rows, are read together.
    """
    found = np.empty((len(lines), span[1] - span[0]))
    for part in _runs(lines // max(BAND, x.chunk[0])):
        inside = lines[part]
        block = read(x, (int(inside[0]), int(inside[-1]) + 1), span, wide=False)
        found[part] = block[inside - inside[0]]
    return found


def _add(sums: Array, x: Array, y: Array, x_at: Array, y_at: Array) -> None:
    """Add the inner products of rows of x and y, which do not depend on how many there are."""
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
