"""Cut blocks of operands into the parts that threads read, write and decode. Pure functions.

A *block* is what one Read or Write moves: a panel of A or B, or a strip of C. In a host slot it is stored in
*groups of columns*, each a contiguous array.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from oocgemm.backends.base import stored_shape
from oocgemm.planning import Op, Operation, Plan
from oocgemm.planning.tiling import Range
from oocgemm.stores import BATCH_BYTES, Array, Matrix, pieces

# A block that can be read or written in arbitrary parts is cut into one part per thread, within these bounds.
# Passing a part to a thread takes tens of microseconds with the GIL, in which no other thread can start or
# end a part.
PIECE_BYTES = 16 << 20
MIN_PIECE_BYTES = 4 << 20


def stored_block(plan: Plan, operation: Operation) -> tuple[Range, Range]:
    """Return the ranges of rows and columns of an operation's block in the stored operand, op() undone."""
    problem = plan.problem
    op = {"A": problem.trans_a, "B": problem.trans_b}.get(operation.operand, Op.N)
    rows, cols = operation.block
    return (cols, rows) if op.swaps else (rows, cols)


def column_groups(plan: Plan, operation: Operation) -> list[Range]:
    """Return the column ranges of an operation's block, relative to its first column, that a slot stores as
    groups.

    A chunk that is encoded or decoded whole gets a group of its own width, so that a codec works in place.
    This also suits a C without a codec: past the page cache, contiguous chunks are written up to twice as
    fast as rows.
    """
    _, (first, last) = stored_block(plan, operation)
    problem, layouts = plan.problem, plan.layouts
    match operation.operand:
        case "C":
            whole, (height, width) = True, plan.chunks
        case operand:
            is_a = operand == "A"
            layout = layouts.a if is_a else layouts.b
            whole = not layout.partial_reads
            height, width = layout.oriented(problem.trans_a if is_a else problem.trans_b).read_chunk
    if whole and height * width * problem.itemsizes[operation.operand] >= BATCH_BYTES:
        cuts = pieces((0, 1), (first, last), (1, width), 1)
        return [(c0 - first, c1 - first) for _, (c0, c1) in cuts]
    return [(0, last - first)]


def slot_views(plan: Plan, operation: Operation, memory: Array, dtype: np.dtype[Any]) -> list[Array]:
    """Return the groups of columns of an operation's block, as views of the start of a slot's memory
    (bytes)."""
    height, width = stored_shape(operation, plan.problem)
    data = memory[: height * width * dtype.itemsize].view(dtype)
    return [
        data[height * c0 : height * c1].reshape(height, c1 - c0) for c0, c1 in column_groups(plan, operation)
    ]


def located(
    plan: Plan, operation: Operation, columns: Sequence[Array]
) -> Iterator[tuple[Range, Range, Array]]:
    """Yield each group of columns with its ranges of rows and columns in the stored operand."""
    rows, (left, _) = stored_block(plan, operation)
    for group in columns:
        yield rows, (left, left := left + group.shape[1]), group


def parts(
    matrix: Matrix, rows: Range, cols: Range, threads: int, *, reading: bool
) -> Iterator[tuple[Range, Range]]:
    """Cut a range of the stored matrix into parts that `threads` threads process one at a time.

    Whole chunks, where a codec needs them: one at a time, or a batch of small ones, which bounds the scratch
    memory. Else pieces within `MIN_PIECE_BYTES` and `PIECE_BYTES` that do not straddle chunks.
    """
    layout, itemsize = matrix.layout, matrix.dtype.itemsize
    height, width = layout.read_chunk if reading else layout.write_chunk
    if not layout.partial_reads if reading else layout.encode_bytes:
        batch = BATCH_BYTES if height * width * itemsize < BATCH_BYTES else 1
        return pieces(rows, cols, (height, width), -(-batch // itemsize))
    size = (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize
    wanted = max(MIN_PIECE_BYTES, min(PIECE_BYTES, size // threads)) // itemsize
    if layout.in_memory or (height, width) == (1, 1):  # one array: pieces of whole rows, or of whole columns
        if layout.contiguous:
            height, width = max(1, wanted // (cols[1] - cols[0])), cols[1]
        else:
            height, width = rows[1], max(1, wanted // (rows[1] - rows[0]))
    elif reading:  # parts of a chunk, of whole lines
        count = max(1, height * width // wanted)
        if layout.contiguous:
            height = _divisor(height, -(-height // count))
        else:
            width = _divisor(width, -(-width // count))
    return pieces(rows, cols, (height, width), wanted)


def _divisor(extent: int, minimum: int) -> int:
    """Return the smallest divisor of an extent that is at least `minimum`."""
    return next(part for part in range(minimum, extent + 1) if extent % part == 0)
