"""Mirror strips of a Gram matrix at the diagonal of C, in host memory, before or while they are written.

The part of a strip that lies on the diagonal, its *diagonal block*, is computed whole. With "full", its
upper triangle is replaced by the conjugate transpose of the lower one, so that C is exactly Hermitian. The
part of a strip left of its diagonal block is also written right of the diagonal, as its conjugate transpose.

If only a triangle is stored, the other triangle of a diagonal block is replaced by what C has there: 0 in an
array that the run creates, and old elements in any other one. If C is in memory, a GPU does all of this
(`oocgemm.backends.cuda.finisher`), but writes 0 over old elements. So `outside_kept` saves the old elements
before the run.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from oocgemm.planning import Operation, Plan
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix, memory
from oocgemm.system.installed import compiled

# Side of the squares in which a diagonal block is mirrored: two of them fit into a CPU cache.
SIDE = 128


def adjoint(block: Array) -> Array:
    """Return the conjugate transpose of a block as a contiguous array."""
    turned = np.ascontiguousarray(block.T)
    return np.conjugate(turned) if turned.dtype.kind == "c" else turned


def complete(plan: Plan, operation: Operation, columns: Sequence[Array]) -> None:
    """Make the diagonal block of a strip exactly Hermitian, in place.

    If only a triangle of C is stored, only the diagonal is changed: it becomes real.

    Args:
        plan: of a Gram matrix.
        operation: the Write of the strip.
        columns: the strip, as one array per range of columns.
    """
    if not plan.grid.is_staircase(operation.tile):
        return
    first, end = operation.m
    left = first - operation.n[0]  # the column of the strip at which its diagonal block starts
    # The diagonal block is cut into squares, so that no square crosses the border of two arrays.
    ends = np.cumsum([0, *(group.shape[1] for group in columns)]) - left
    height = end - first
    cuts = sorted({0, height, *range(0, height, SIDE), *(int(x) for x in ends if 0 < x < height)})
    squares = list(pairwise(cuts))
    library, (strip, *others) = compiled(), columns
    if library is not None and not (others or plan.problem.triangle) and _is_words(strip):
        block, threads = strip[:, left:], plan.machine.cores if plan.machine.shares_cores else 1
        library.ooc_mirror(
            ctypes.c_void_p(block.ctypes.data),
            *(ctypes.c_ssize_t(block.strides[0]), ctypes.c_size_t(height)),
            *(ctypes.c_size_t(block.itemsize), ctypes.c_size_t(threads)),
        )
        return

    def at(rows: Range, cols: Range) -> Array:
        group = int(np.searchsorted(ends, cols[0], side="right")) - 1
        offset = int(ends[group])
        return columns[group][slice(*rows), cols[0] - offset : cols[1] - offset]

    for number, one in enumerate(squares):
        block = at(one, one)
        if not plan.problem.triangle:
            for other in squares[:number]:
                at(other, one)[...] = adjoint(at(one, other))
            block[...] = np.where(np.tri(len(block), dtype=bool), block, adjoint(block))
        if block.dtype.kind == "c":
            diagonal = np.arange(len(block))
            block[diagonal, diagonal] = block[diagonal, diagonal].real


def _is_words(strip: Array) -> bool:
    """Return whether compiled code can mirror a strip: real elements, in aligned and contiguous rows."""
    fits = strip.dtype.kind in "fi" and strip.itemsize in (4, 8) and strip.strides[1] == strip.itemsize
    return bool(fits and strip.flags.aligned)


def mirrored(
    plan: Plan, operation: Operation, located: Sequence[tuple[Range, Range, Array]]
) -> Iterator[tuple[Range, Range, Array]]:
    """Yield the blocks of a strip whose conjugate transposes are stored right of the diagonal of C.

    Args:
        plan: of a Gram matrix.
        operation: the Write of the strip.
        located: the arrays of the strip, each with its rows and columns in C.

    Yields:
        The rows and columns in C where the conjugate transpose is stored, and a view of the block that is
        transposed but not conjugated.
    """
    _, end = plan.grid.mirrored(operation.tile, operation.m)
    for rows, (left, right), group in located:
        if left < min(right, end):
            yield (left, min(right, end)), rows, group[:, : min(right, end) - left].T


def outside(triangle: str, rows: Range, cols: Range) -> Range:
    """Return the columns of a block of C that have elements outside of a triangle; an empty range if none.

    >>> outside("lower", (2, 4), (0, 9)), outside("upper", (2, 4), (0, 9)), outside("lower", (5, 9), (0, 5))
    ((3, 9), (0, 3), (5, 5))
    """
    if triangle == "lower":
        return min(max(cols[0], rows[0] + 1), cols[1]), cols[1]
    return cols[0], max(min(cols[1], rows[1] - 1), cols[0])


def replace_outside(triangle: str, rows: Range, cols: Range, block: Array, old: Array | None) -> None:
    """Replace the elements of a block of C that are outside of a triangle, in place, by old elements or by 0.

    Args:
        triangle: "lower" or "upper".
        rows, cols: where the block is in C.
        block: the elements of the block.
        old: the elements of C in the columns that `outside` returns; None if they are 0.
    """
    start, stop = outside(triangle, rows, cols)
    for number, row in enumerate(range(*rows)):
        first, end = (max(start, row + 1), stop) if triangle == "lower" else (start, min(stop, row))
        if first < end:
            kept = 0 if old is None else old[number, first - start : end - start]
            block[number, first - cols[0] : end - cols[0]] = kept


@contextmanager
def outside_kept(plan: Plan, matrix: Matrix) -> Iterator[None]:
    """Restore the elements of C outside of a triangle when the context ends, if the run overwrites them.

    Only the diagonal blocks of strips are saved: nothing else outside of the triangle is written.
    """
    if not plan.setting.restores_outside:
        yield
        return
    grid, strip, c = plan.grid, plan.slots.strip, memory(matrix)
    starts = (
        (first, min(first + strip, grid.rows(i)[1]))
        for i in range(grid.shape[0])
        for first in range(*grid.rows(i), strip)
    )
    saved = [(slice(*rows), c[slice(*rows), slice(*rows)].copy()) for rows in starts]
    try:
        yield
    finally:
        for at, old in saved:
            inside = np.tri(len(old), dtype=bool)
            np.copyto(c[at, at], old, where=~(inside if plan.problem.triangle == "lower" else inside.T))


def trimmed(
    plan: Plan, operation: Operation, located: Sequence[tuple[Range, Range, Array]]
) -> Iterator[tuple[Range, Range, Array]]:
    """Yield the blocks of a strip without the chunks of C that lie wholly in a triangle that is not stored.

    Args:
        plan: of a Gram matrix.
        operation: the Write of the strip.
        located: the arrays of the strip, each with its rows and columns in C.
    """
    height, width = plan.chunks
    gram = plan.problem.triangle
    if not gram or height == 1 or not plan.grid.is_staircase(operation.tile):
        yield from located
        return
    for (top, bottom), (left, right), block in located:
        for first in range(top, bottom, height):
            end = min(first + height, bottom)
            start, stop = left, right
            if gram == "lower":
                stop = min(right, -(-end // width) * width)
            else:
                start = max(left, first // width * width)
            if start < stop:
                yield (first, end), (start, stop), block[first - top : end - top, start - left : stop - left]
