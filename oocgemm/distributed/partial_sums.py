"""Add the partial products of slices of k, in the order of the slices, and apply alpha and beta."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.integers import finish
from oocgemm.planning import GemmProblem, Plan
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.tiling import Range, Tile, length
from oocgemm.stores import Array, Matrix, pieces
from oocgemm.system.threads import Cancel

# Blocks of C have at least this many elements, if its chunks have fewer.
MIN_ELEMENTS = 1 << 18
# More threads than this add no faster: they wait for memory.
MAX_THREADS = 8


def add_block(
    partial: Matrix, slicing: Slicing, problem: GemmProblem, old: Array, rows: Range, cols: Range
) -> None:
    """Replace a block of C by ``alpha (P_0 + P_1 + ...) + beta C``. The sum is rounded after each addition.

    Args:
        partial: the partial products P_q in the accumulator's dtype, stacked (`Slicing`).
        slicing: the slices.
        problem: has alpha, beta and the dtypes.
        old: the block of C, C-contiguous. It is not read if beta = 0.
        rows, cols: where the block is in C.

    Raises:
        ExecutionError: the dtype of C is an integer, and an element is outside its range.
    """
    # Sums of int8 products are integers that float64 represents exactly.
    total = np.zeros(old.shape, np.float64 if problem.exact else partial.dtype)
    piece = np.empty(old.shape, partial.dtype)
    for number in range(len(slicing.ranges)):
        top = number * slicing.rows
        partial.read((rows[0] + top, rows[1] + top), cols, piece)
        with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
            total += piece
    if problem.finishes:
        space = np.empty(FINISH_ARRAYS * min(FINISH_PIECE, total.size) * total.itemsize, np.uint8)
        finish(total, problem.alpha.real, problem.beta.real, old, space)
        return
    alpha, beta = (total.dtype.type(_scalar(problem, x)) for x in (problem.alpha, problem.beta))
    with np.errstate(all="ignore"):
        total *= alpha
        if beta:
            old *= beta
            total += old
        old[...] = total


def add_slices(
    partial: Matrix,
    slicing: Slicing,
    plan: Plan,
    c: Matrix,
    finished: Callable[[Tile], None],
    cancel: Cancel,
) -> None:
    """Compute all tiles of a plan that are not done from the partial products of its slices, in threads.

    Args:
        partial, slicing: the partial products, as for `add_block`.
        plan: the plan of the whole product.
        c: where C is written, and read from if beta is not 0.
        finished: called with each tile that is written. One thread at a time calls it.
        cancel: lets another thread stop the work.

    Raises the first error of a thread, or that of `cancel`.
    """
    stopped: list[BaseException] = []
    lock = threading.Lock()

    def add(tile: Tile) -> None:
        for rows, cols in _blocks(plan, tile):
            if stopped:
                return
            block = np.empty((length(rows), length(cols)), numpy_dtype(plan.problem.c_dtype))
            if plan.problem.reads_c:
                c.read(rows, cols, block)
            add_block(partial, slicing, plan.problem, block, rows, cols)
            c.write(rows, cols, block)
        with lock:
            finished(tile)

    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with cancel.calling(stopped.append), ThreadPoolExecutor(threads, "oocgemm-sum") as pool:
        try:
            for done in [pool.submit(add, tile) for tile in plan.tiles]:
                done.result()
        except BaseException as error:
            stopped.append(error)
            pool.shutdown(cancel_futures=True)
    if stopped:
        raise stopped[0]


def _blocks(plan: Plan, tile: Tile) -> Iterator[tuple[Range, Range]]:
    """Cut a tile of C into blocks of whole chunks."""
    yield from pieces(plan.grid.rows(tile[0]), plan.grid.cols(tile[1]), plan.chunks, MIN_ELEMENTS)


def _scalar(problem: GemmProblem, value: complex) -> complex:
    return value if numpy_dtype(problem.c_dtype).kind == "c" else value.real
