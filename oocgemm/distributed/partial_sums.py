"""Add the partial products of slices of k, in the order of the slices, and apply alpha and beta."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter_ns

import numpy as np

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.integers import finish
from oocgemm.jobs.output import Target
from oocgemm.planning import GemmProblem, Kind, Lane, Plan
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.parts.slicing import Slicing
from oocgemm.planning.tiling import Range, Tile, length
from oocgemm.stores import Array, Matrix, pieces
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder, Span

# Blocks of C have at least this many elements, if its chunks have fewer.
MIN_ELEMENTS = 1 << 18
# More threads than this add no faster: they wait for memory.
MAX_THREADS = 8
LANES = {Kind.READ: Lane.READ, Kind.FINISH: Lane.COMPUTE, Kind.WRITE: Lane.WRITE}


# Called with the kind of an operation that has just ended, its step, its start in nanoseconds of
# `perf_counter_ns`, and its bytes.
Note = Callable[[Kind, int, int, int], None]


def add_block(
    products: Matrix,
    slicing: Slicing,
    problem: GemmProblem,
    old: Array,
    rows: Range,
    cols: Range,
    note: Note,
) -> None:
    """Replace a block of C by ``alpha (P_0 + P_1 + ...) + beta C``. The sum is rounded after each addition.

    Args:
        products: the partial products P_q in the accumulator's dtype, stacked (`Slicing`).
        slicing: the slices.
        problem: has alpha, beta and the dtypes.
        old: the block of C, C-contiguous. It is not read if beta = 0.
        rows, cols: where the block is in C.
        note: called after each operation. The step is the number of the slice.

    Raises:
        ExecutionError: the dtype of C is an integer, and an element is outside its range.
    """
    # Sums of int8 products are integers that float64 represents exactly.
    total = np.zeros(old.shape, np.float64 if problem.exact else products.dtype)
    piece = np.empty(old.shape, products.dtype)
    for number in range(len(slicing.ranges)):
        top, start = number * slicing.rows, perf_counter_ns()
        products.read((rows[0] + top, rows[1] + top), cols, piece)
        note(Kind.READ, number, start, piece.nbytes)
        start = perf_counter_ns()
        with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
            total += piece
        note(Kind.FINISH, number, start, 0)
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
    products: Matrix,
    slicing: Slicing,
    plan: Plan,
    target: Target,
    log: Recorder,
    origin: int,
    cancel: Cancel,
) -> None:
    """Compute all tiles of a plan that are not done from the partial products of its slices, in threads.

    Args:
        products, slicing: the partial products, as for `add_block`.
        plan: the plan of the whole product.
        target: where C is written, and read from if beta is not 0.
        log: records the reads, sums and writes.
        origin: value of `perf_counter_ns` from which the times in the log are counted.
        cancel: lets another thread stop the work.

    Raises the first error of a thread, or that of `cancel`.
    """
    stopped: list[BaseException] = []
    lock = threading.Lock()
    c = target.matrix

    def record(tile: Tile, kind: Kind, step: int, start: int, size: int) -> None:
        with lock:
            lane, now = LANES[kind].value, perf_counter_ns()
            place = log.spans, kind.value, "C", lane, "sum", 0
            log.add(Span(*place, tile, step, start - origin, now - origin, size, 0))

    def add(tile: Tile) -> None:
        for rows, cols in _blocks(plan, tile):
            if stopped:
                return
            block = np.empty((length(rows), length(cols)), numpy_dtype(plan.problem.c_dtype))
            note = partial(record, tile)
            if plan.problem.reads_c:
                start = perf_counter_ns()
                c.read(rows, cols, block)
                note(Kind.READ, 0, start, block.nbytes)
            add_block(products, slicing, plan.problem, block, rows, cols, note)
            start = perf_counter_ns()
            c.write(rows, cols, block)
            note(Kind.WRITE, 0, start, block.nbytes)
        with lock:
            target.finished(tile)

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
