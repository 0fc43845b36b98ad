"""Products whose k is divided into slices: compute the partial product of each slice, then add them.

The partial products are one array in the folder of C's journal, with a journal of its own. The same workers
compute this array like any other product, and its run can be resumed. The result has the same bits for any
number of workers, since the slices follow from the plan: `add_slices` adds in the order of the slices, then
applies alpha and beta.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter_ns

import numpy as np

from oocgemm import stores
from oocgemm.backends import Backend
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.host.finish import finish
from oocgemm.jobs import output
from oocgemm.jobs.journal import PARTIAL
from oocgemm.jobs.output import Target
from oocgemm.jobs.prepare import PreparedRun, prepare
from oocgemm.jobs.request import Destination
from oocgemm.planning import GemmProblem, Kind, Lane, Plan
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.partition import Part, Slicing, bands, divide
from oocgemm.planning.tiling import Range, Tile, ceil_div, length
from oocgemm.stores import Array, Matrix, pieces
from oocgemm.system.threads import Cancel
from oocgemm.timeline import Recorder, Span

# Minimum number of elements of a block of C that is added, if chunks have fewer.
MIN_ELEMENTS = 1 << 18
# Maximum number of threads. More threads would only wait for memory.
MAX_THREADS = 8
LANES = {Kind.READ: Lane.READ, Kind.FINISH: Lane.COMPUTE, Kind.WRITE: Lane.WRITE}


# Called with the kind of an operation that has just ended, its step, its start in nanoseconds of
# `perf_counter_ns`, and its bytes.
Note = Callable[[Kind, int, int, int], None]
Compute = Callable[[PreparedRun, output.Target, tuple[Part, ...]], None]


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

    - `products`: the partial products P_q in the accumulator's dtype, stacked (`Slicing`).
    - `problem`: has alpha, beta and the dtypes.
    - `old`: the block of C, C-contiguous, at `rows` and `cols`. It is not read if beta = 0.
    - `note`: called after each operation. The step is the number of the slice.

    Raises `ExecutionError` if the dtype of C is an integer, and an element is outside its range.
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
    """Compute the unfinished tiles of a plan from the partial products of its slices, in threads.

    `plan` is the plan of the whole product. C is written to `target`, and read from there if beta is not 0.
    Times in `log` are counted from `origin`, a value of `perf_counter_ns`.
    """
    stopped: list[BaseException] = []
    lock = threading.Lock()
    c, finished = target.matrix, target.finished

    def record(tile: Tile, kind: Kind, step: int, start: int, size: int) -> None:
        with lock:
            lane, now = LANES[kind].value, perf_counter_ns()
            place = log.spans, kind.value, "C", lane, "sum", 0
            log.add(Span(*place, tile, step, start - origin, now - origin, size, 0))

    def add(tile: Tile) -> None:
        for rows, cols in pieces(plan.grid.rows(tile[0]), plan.grid.cols(tile[1]), plan.chunks, MIN_ELEMENTS):
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
        if finished is not None:
            with lock:
                finished(tile, plan.grid.blocks(tile))

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


def _scalar(problem: GemmProblem, value: complex) -> complex:
    return value if numpy_dtype(problem.c_dtype).kind == "c" else value.real


def partial_products(
    job: PreparedRun, engine: Backend, parts: tuple[Part, ...], compute: Compute
) -> tuple[Matrix, Slicing]:
    """Compute the partial products of all slices of k. Return the stacked products, and the slices.

    `job` is the whole product, planned for `engine`. Each of its `parts` belongs to one slice. `compute`
    computes parts of a job, and moves their tiles into its C.
    """
    plan = job.plan
    slicing = Slicing.of(plan.grid, 1 + max(part.k_slice for part in parts))
    assert job.output.earlier is not None
    path = str(job.output.earlier.local / PARTIAL)
    request = job.request.with_options(
        c=Destination.parse(path),
        alpha=1.0,
        beta=0.0,
        out_dtype=plan.problem.acc_dtype,
        memory=None,
        device_memory=plan.budgets.device,
        host_memory=plan.budgets.host,
        tile=plan.tile,
        chunks=None,
        compressor=None,
        overwrite=False,
        resume=True,
        timeline=None,
        slicing=slicing,
    )
    stacked = prepare(request, engine, running=True)
    stacked = replace(stacked, output=replace(stacked.output, noted={**job.output.noted, "k_slices": 1}))
    with output.open_target(stacked) as target:
        if isinstance(target, output.Journaled):
            compute(stacked, target, tuple(slicing.stacked(part, plan.grid) for part in parts))
        target.seal()
    return stores.open_matrix("C", path), slicing


def parts_again(plan: Plan, workers: int, k_slices: int) -> tuple[Part, ...]:
    """Return the parts of an interrupted run: about as many as there are workers.

    The bits of C follow from the tiles and the slices of k of the plan. Among the divisions of each slice,
    the function chooses the division whose parts read least of A and B.
    """
    if plan.has_whole_rows:
        return bands(plan.grid, workers)
    rows, cols = plan.grid.shape
    each = ceil_div(workers, k_slices)
    pairs = [(down, min(cols, ceil_div(each, down))) for down in range(1, min(rows, each) + 1)]
    down, across = min(
        pairs,
        key=lambda pair: (-min(each, pair[0] * pair[1]), pair[1] * plan.problem.m + pair[0] * plan.problem.n),
        default=(1, 1),
    )
    return divide(plan.grid, down, across, k_slices)
