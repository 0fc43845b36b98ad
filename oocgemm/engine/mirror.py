"""Mirror strips of a Gram matrix at the diagonal of C, in host memory, before or while they are written.

The part of a strip that lies on the diagonal, its *diagonal block*, is computed whole. One of its triangles
is replaced by the conjugate transpose of the other one, so that C is exactly Hermitian. With "full", the part
of a strip left of its diagonal block is also written right of the diagonal, as its conjugate transpose. If C
is in memory, a GPU does both (`oocgemm.backends.cuda.turner`).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from oocgemm.planning import Operation, Plan
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array

# Side of the squares in which a diagonal block is mirrored: two of them fit into a CPU cache.
SIDE = 128


def adjoint(block: Array) -> Array:
    """Return the conjugate transpose of a block as a contiguous array."""
    turned = np.ascontiguousarray(block.T)
    return np.conjugate(turned) if turned.dtype.kind == "c" else turned


def complete(plan: Plan, operation: Operation, columns: Sequence[Array]) -> None:
    """Make the diagonal block of a strip exactly Hermitian, in place.

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

    def at(rows: Range, cols: Range) -> Array:
        group = int(np.searchsorted(ends, cols[0], side="right")) - 1
        offset = int(ends[group])
        return columns[group][slice(*rows), cols[0] - offset : cols[1] - offset]

    upper = plan.problem.gram == "upper"
    for number, one in enumerate(squares):
        for other in squares[:number]:
            source, target = at(one, other), at(other, one)
            if upper:
                source, target = target, source
            target[...] = adjoint(source)
        block = at(one, one)
        keep = np.tri(len(block), dtype=bool)
        block[...] = np.where(keep.T if upper else keep, block, adjoint(block))
        if block.dtype.kind == "c":
            diagonal = np.arange(len(block))
            block[diagonal, diagonal] = block[diagonal, diagonal].real


def mirrored(
    plan: Plan, operation: Operation, located: Sequence[tuple[Range, Range, Array]]
) -> Iterator[tuple[Range, Range, Array]]:
    """Yield the blocks of a strip that are also stored right of the diagonal, where they are not computed.

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
    gram = plan.problem.gram
    if gram == "full" or height == 1 or not plan.grid.is_staircase(operation.tile):
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
