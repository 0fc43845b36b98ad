"""Read an array once, block by block in several threads, with results in an order that never changes."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from oocgemm.errors import ExecutionError
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix, pieces
from oocgemm.stores.arrays import read_block, viewed
from oocgemm.stores.base import failure

T = TypeVar("T")
# Maximum numbers of threads of a pass, in all and per core. With two per core, one computes while the other
# reads from the disk.
MAX_THREADS, THREADS_PER_CORE = 16, 2
# Minimum bytes of a block. With smaller ones, threads mostly wait for the GIL.
BATCH_BYTES = 4 << 20
# Blocks of a plain array in memory are that many times as large: they are not copied.
VIEWED = 4
# Columns of the blocks in which an array without chunks is read along its columns.
COLUMNS = 1 << 12


def reduced(
    matrix: Matrix, axis: int, memory: int, scratch: int, act: Callable[[Range, Range, Array], T]
) -> Iterator[tuple[Range, Range, T]]:
    """Read a matrix, and yield the rows, the columns and a result of each of its blocks.

    Blocks and their order depend on the matrix alone. So results that are added up in this order are the same
    in every bit, whatever the number of threads.

    Args:
        matrix: what is read.
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

    def work(rows: Range, cols: Range) -> T:
        try:
            raw = read_block("raw", matrix, rows, cols)
        except Exception as error:  # a store may raise any exception
            raise ExecutionError(failure("reading", matrix, rows, cols, error)) from error
        return act(rows, cols, raw)

    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-stats") as pool:
        submitted = deque[tuple[Range, Range, Future[T]]]()

        def submit(count: int) -> None:
            submitted.extend(
                (rows, cols, pool.submit(work, rows, cols)) for rows, cols in islice(todo, count)
            )

        submit(2 * threads)
        while submitted:
            rows, cols, result = submitted.popleft()
            yield rows, cols, result.result()
            submit(1)


def _unit(matrix: Matrix, axis: int, batch: int) -> tuple[int, int]:
    """Return the shape of the parts in which a matrix is read: chunks, or rows of large chunks."""
    (height, width), layout = matrix.layout.read_chunk, matrix.layout
    if (height, width) == (1, 1):
        return (max(1, batch // COLUMNS), COLUMNS) if axis == 0 else (1, batch)
    return (max(1, min(height, batch // width)), width) if layout.partial_reads else (height, width)
