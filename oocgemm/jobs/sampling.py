"""Check samples of the result of a run with `verify`, if checksums do not cover what is stored."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter
from typing import Any

from oocgemm import stores
from oocgemm.integrity.blocks import MIN_PIECE
from oocgemm.integrity.chained import check_chained
from oocgemm.integrity.passes import PIECE, Oriented, Passes
from oocgemm.integrity.samples import Made, Samples
from oocgemm.jobs.prepare import Job
from oocgemm.jobs.streaming import MAX_THREADS, THREADS_PER_CORE
from oocgemm.jobs.transforms import memory_of, readable, transformed
from oocgemm.planning import Op
from oocgemm.stores import Matrix
from oocgemm.stores.sparse import SparseMatrix
from oocgemm.stores.transformed import TransformedMatrix


def needs_samples(job: Job) -> bool:
    """Return whether samples of the result are to be checked after the run."""
    problem, request = job.plan.problem, job.request
    made = problem.checks_sums or request.selection is not None or request.chain is not None
    return request.verify and made and 0 not in (problem.m, problem.n)


def check_samples(job: Job, result: Matrix) -> dict[str, Any]:
    """Check samples of the result of a run, and return how many, for the report.

    Raises `ExecutionError` if a sample is wrong, or an operand cannot be read.
    """
    started = perf_counter()
    problem, selection = job.plan.problem, job.request.selection
    memory = memory_of(job.request) // 4
    sides = (job.a, problem.trans_a, True), (job.b, problem.trans_b, False)
    a, b = (Oriented(_as_multiplied(x, op, memory, left=left), op.swaps) for x, op, left in sides)
    made = Made(stored=Oriented(result))
    if isinstance(result, SparseMatrix):
        assert selection is not None
        least = float(result.dtype.type(selection.threshold))
        made = Made(
            sparse=result.csr(),
            least=least,
            absolute=selection.absolute,
            excludes_self=selection.excludes_self,
        )
    elif problem.kept:
        excludes = selection is not None and selection.excludes_self
        made = Made(kept=stores.memory(result), excludes_self=excludes, factor=job.factor)
    piece = max(MIN_PIECE, min(PIECE, memory // (32 * _threads())))
    room = max(x.piece_bytes(piece) for x in (a, b)) + 16 * piece  # the elements in float64, twice
    threads = max(1, min(_threads(), memory // room))
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-samples") as pool:
        passes = Passes(pool, threads, piece)
        further = None if job.d is None else Oriented(job.d)
        samples = Samples(problem, a, b, further, job.finishing, passes, memory)
        samples.check(made)
    return {"sampled": samples.elements, "sampled_seconds": perf_counter() - started}


def _as_multiplied(matrix: Matrix, op: Op, memory: int, *, left: bool) -> Matrix:
    """Return an operand whose elements are those that the product has, with centers subtracted."""
    if isinstance(matrix, TransformedMatrix) and matrix.transform.corrects:
        exact = replace(matrix.transform, cast="float64")
        return readable(transformed(matrix.stored, exact, op, left=left), memory)
    return matrix


def check_pass(job: Job, result: Matrix) -> None:
    """Check the product of a pass of `pca` over X. Raises `ExecutionError` as `check_samples` does."""
    chain, problem = job.request.chain, job.plan.problem
    assert chain is not None
    assert chain.factor is not None
    x = Oriented(job.a, not problem.trans_a.swaps)
    room = memory_of(job.request) // (4 * _threads() * problem.m * job.a.dtype.itemsize)
    band = max(1, min(job.plan.tile.k, room))
    check_chained(x, chain.factor, chain.row, stores.memory(result), band=band, threads=_threads())


def _threads() -> int:
    return max(1, min(MAX_THREADS, THREADS_PER_CORE * len(os.sched_getaffinity(0))))
