"""Compute elements of a result again after the run.

With `verify`, these are samples of what is stored, if checksums do not cover it. With a threshold, they are
cosines so near to it that rounding errors could decide. A run keeps all pairs whose computed cosine is at
least the threshold less a margin (`Selection.margin`). Those within the margin are computed in float64 from
the operands, and compared with the threshold. The sums of a pair are added up in an order that depends on the
number of columns alone. So equal rows have the cosine 1.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.errors import ExecutionError
from oocgemm.integrity.blocks import MIN_PIECE
from oocgemm.integrity.chained import check_chained
from oocgemm.integrity.passes import PIECE, Oriented, Passes
from oocgemm.integrity.samples import Made, Samples, read
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.streaming import MAX_THREADS, THREADS_PER_CORE
from oocgemm.jobs.transforming import memory_of, readable, transformed
from oocgemm.planning import Op
from oocgemm.planning.sinks import AtLeast
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Collecting, Matrix
from oocgemm.stores.base import ReadError, Retries
from oocgemm.stores.transformed import StandardizedMatrix, TransformedMatrix
from oocgemm.system.threads import Cancel

# Columns of the rows that are multiplied at a time, and maximum number of products.
DEPTH, PRODUCTS = 1 << 14, 1 << 20
# Rows that are read together if chunks have fewer.
BAND = 32


def needs_samples(job: PreparedRun) -> bool:
    """Return whether samples of the result are to be checked after the run."""
    problem, request = job.plan.problem, job.request
    made = problem.checks_sums or request.selection is not None or request.chain is not None
    return request.verify and made and 0 not in (problem.m, problem.n)


def check_samples(job: PreparedRun, result: Matrix, retries: Retries, cancel: Cancel) -> dict[str, Any]:
    """Check samples of the result of a run, and return how many, for the report.

    Reads that were tried again are added to `retries`. Raises `ExecutionError` if a sample is wrong, or an
    operand cannot be read, and the error of `cancel`.
    """
    started = perf_counter()
    problem, selection = job.plan.problem, job.request.selection
    memory = memory_of(job.request) // 4
    sides = (job.a, problem.trans_a, True), (job.b, problem.trans_b, False)
    oriented = partial(Oriented, retries=retries)
    how: Any = {"distances": problem.measures_distances}
    a, b = (oriented(_as_multiplied(x, op, memory, left=left, **how), op.swaps) for x, op, left in sides)
    made = Made(problem.sink, stored=oriented(result))
    if isinstance(result, Collecting):
        assert selection is not None
        least = selection.threshold
        least = least if selection.margin(problem) else float(result.dtype.type(least))
        found = AtLeast(
            problem.c_dtype,
            excludes_self=selection.excludes_self,
            threshold=least,
            absolute=selection.absolute,
        )
        made = Made(found, sparse=result.csr())
    elif problem.sink.per_row:
        made = Made(problem.sink, kept=stores.memory(result), factor=job.factor)
    piece = max(MIN_PIECE, min(PIECE, memory // (32 * _threads())))
    room = max(x.piece_bytes(piece) for x in (a, b)) + 16 * piece  # the elements in float64, twice
    threads = max(1, min(_threads(), memory // room))
    with (
        reading_again(retries, cancel) as check_cancelled,
        ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-samples") as pool,
    ):
        passes = Passes(pool, threads, piece, report=lambda doing: check_cancelled())
        further = None if job.d is None else oriented(job.d)
        samples = Samples(problem, a, b, further, job.finishing, passes, memory)
        samples.check(made)
    return {"sampled": samples.elements, "sampled_seconds": perf_counter() - started}


def _as_multiplied(matrix: Matrix, op: Op, memory: int, *, left: bool, distances: bool) -> Matrix:
    """Return an operand whose elements are those that the product has, with centers subtracted.

    If samples are compared with exact `distances`, the elements are not rounded.
    """
    if not isinstance(matrix, TransformedMatrix):
        return matrix
    if distances:
        return matrix.wide()
    if matrix.transform.corrects:
        exact = replace(matrix.transform, cast="float64")
        return readable(transformed(matrix.stored, exact, op, left=left), memory)
    return matrix


@contextmanager
def reading_again(retries: Retries, cancel: Cancel) -> Iterator[Callable[[], None]]:
    """Let errors of reading the operands again end the run with a message that says so.

    Yields a function that raises the error of `cancel`, if the run is to stop. No read is retried then.
    """
    errors = list[BaseException]()

    def stop(error: BaseException) -> None:
        errors.append(error)
        retries.stop()

    def check_cancelled() -> None:
        if errors:
            raise errors[0]

    try:
        with cancel.calling(stop):
            yield check_cancelled
    except ReadError as error:
        check_cancelled()
        raise ExecutionError(f"the result cannot be checked: {error}") from error


def check_pass(job: PreparedRun, result: Matrix, retries: Retries, cancel: Cancel) -> None:
    """Check the product of a pass of `pca` over X. Raises `ExecutionError` as `check_samples` does."""
    chain, problem = job.request.chain, job.plan.problem
    assert chain is not None
    assert chain.factor is not None
    x = Oriented(job.a, not problem.trans_a.swaps, retries=retries)
    # A thread reads whole chunks, as few at a time as possible. Fewer threads are better than bands that are
    # lower than chunks, which would be decoded once per band.
    memory, row = memory_of(job.request) // 4, problem.m * job.a.dtype.itemsize
    each = job.a.layout.decode_bytes + 24 * PIECE + 40 * problem.m
    chunk = min(x.chunk[0], x.shape[0])
    threads = max(1, min(_threads(), memory // (each + chunk * row)))
    room = max(memory // threads - each, memory // (2 * threads))
    band = max(1, min(max(chunk, job.plan.tile.k), room // row))
    band = band // chunk * chunk or band
    with reading_again(retries, cancel) as check_cancelled:
        check_chained(
            *(x, chain.factor, chain.row, stores.memory(result)),
            band=band,
            threads=threads,
            report=check_cancelled,
        )


def _threads() -> int:
    return max(1, min(MAX_THREADS, THREADS_PER_CORE * len(os.sched_getaffinity(0))))


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
    if problem.cover.halves:  # a pair is computed once
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
