"""Check samples of the result of a run with `verify`, if checksums do not cover what is stored."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from oocgemm import stores
from oocgemm.errors import ExecutionError
from oocgemm.integrity.blocks import MIN_PIECE
from oocgemm.integrity.chained import check_chained
from oocgemm.integrity.passes import PIECE, Oriented, Passes
from oocgemm.integrity.samples import Made, Samples
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.streaming import MAX_THREADS, THREADS_PER_CORE
from oocgemm.jobs.transforms import memory_of, readable, transformed
from oocgemm.planning import Op
from oocgemm.planning.sinks import AtLeast
from oocgemm.stores import Collecting, Matrix
from oocgemm.stores.base import ReadError, Retries
from oocgemm.stores.transformed import TransformedMatrix
from oocgemm.system.threads import Cancel


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
