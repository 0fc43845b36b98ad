"""Check results: compute samples again after a run, and check that a stored C is the product of A and B.

`verify` checks a C by Freivalds' algorithm, and locates its errors. The other functions compute elements of
a result again at the end of the run.

With ``verify=True``, they compute samples of the stored result again, if checksums do not cover it. With a
threshold, they compute cosines again that are so near to the threshold that rounding errors could decide. A
run keeps all pairs whose computed cosine is at least the threshold less a margin (`Selection.margin`). Those
within the margin are computed in float64 from the operands, and compared with the threshold. The sums of a
pair are added up in an order that depends on the number of columns alone. So equal rows have the cosine 1.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from oocgemm import stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.checksums import VECTORS
from oocgemm.errors import ExecutionError, InputError
from oocgemm.integrity.freivalds import MIN_PIECE, Check, CheckedProduct, check_chained, cut, hull
from oocgemm.integrity.passes import PIECE, Oriented, Passes
from oocgemm.integrity.rounding import BOUNDS, FALSE_ALARM
from oocgemm.integrity.samples import SampledResult, Samples
from oocgemm.jobs.operands import op_of, problem_of
from oocgemm.jobs.option_groups import Operand, Size, Transpose
from oocgemm.jobs.pairs import cosines
from oocgemm.jobs.prepare import PreparedRun
from oocgemm.jobs.request import Chain, Selection
from oocgemm.jobs.resume import check_complete, recorded_uplo
from oocgemm.jobs.streaming import MAX_THREADS, THREADS_PER_CORE
from oocgemm.jobs.transforming import check_known, how_to_replace, memory_of, readable, transformed
from oocgemm.planning import DTYPES, GemmProblem, Op
from oocgemm.planning.cover import GRAMS
from oocgemm.planning.sinks import AtLeast
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.planning.units import parse_size
from oocgemm.stores import Collecting, Matrix
from oocgemm.stores.base import MirroredMatrix, ReadError, Retries
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import as_multiplied, chain_of
from oocgemm.system.resources import available_memory
from oocgemm.system.threads import Cancel
from oocgemm.values import dataclass


def check_result(job: PreparedRun, result: Matrix, retries: Retries, cancel: Cancel) -> dict[str, Any]:
    """Check the result of a run, and return the figures for the report. See `check_samples`."""
    if isinstance(job.request.into, Chain):
        check_pass(job, result, retries, cancel)
        return {}
    return check_samples(job, result, retries, cancel)


def check_samples(job: PreparedRun, result: Matrix, retries: Retries, cancel: Cancel) -> dict[str, Any]:
    """Check samples of the result of a run. Return their number and the seconds, for the report.

    Reads that were tried again are added to `retries`. Raises `ExecutionError` if a sample is wrong.
    """
    started = perf_counter()
    problem, selection = job.plan.problem, job.request.into
    memory = memory_of(job.request) // 4
    sides = (job.a, problem.trans_a), (job.b, problem.trans_b)
    oriented, distances = partial(Oriented, retries=retries), problem.measures_distances
    a, b = (oriented(_as_multiplied(x, distances=distances), op.swaps) for x, op in sides)
    made = SampledResult(problem.sink, stored=oriented(result))
    if isinstance(result, Collecting):
        assert isinstance(selection, Selection)
        least = selection.threshold
        least = least if selection.margin(problem) else float(result.dtype.type(least))
        found = AtLeast(
            problem.c_dtype,
            excludes_self=selection.excludes_self,
            threshold=least,
            absolute=selection.absolute,
        )
        made = SampledResult(found, sparse=result.csr(), once=selection.band is not None)
    elif problem.sink.per_row:
        made = SampledResult(problem.sink, kept=stores.memory(result), factor=job.factor)
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


def _as_multiplied(matrix: Matrix, *, distances: bool) -> Matrix:
    """Return an operand as it is multiplied, but with elements not rounded if `distances` are compared."""
    chain = chain_of(matrix)
    if chain is None:
        return matrix
    return chain.wide() if distances else chain.exact()


@contextmanager
def reading_again(retries: Retries, cancel: Cancel) -> Iterator[Callable[[], None]]:
    """If reading the operands again fails, raise an error that says that the result cannot be checked.

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
    """Check the product of a pass of `pca` over X. Raises `ExecutionError` if the product is wrong."""
    chain, problem = job.request.into, job.plan.problem
    assert isinstance(chain, Chain)
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
    """Decide which pairs within the margin of the threshold are kept. Repeated reads go to `retries`."""
    problem, selection = job.plan.problem, job.request.into
    assert isinstance(selection, Selection)
    near = selection.margin(problem)
    if not near:
        return
    starts, cols, scores = found.csr()
    found_near = [np.empty(0, np.int64)]
    for start in range(0, len(scores), PIECE):
        part = scores[start : start + PIECE]
        sizes = np.abs(part) if selection.absolute else part
        found_near.append(start + np.flatnonzero(sizes <= selection.threshold + near))
    at = np.concatenate(found_near)
    if not at.size:
        return
    rows = np.searchsorted(starts, at, side="right") - 1
    exact, mirrored = np.empty(at.size), np.zeros(at.size, bool)
    if problem.cover.halves and selection.band is None:  # a pair is computed once
        mirrored = cols[at] > rows
    once = np.flatnonzero(~mirrored)
    left, right = (
        Oriented(_as_multiplied(x, distances=True), swapped, retries=retries)
        for x, swapped in ((job.a, problem.trans_a.swaps), (job.b, not problem.trans_b.swaps))
    )
    with reading_again(retries, cancel) as check_cancelled:
        memory = memory_of(job.request) // 4
        exact[once] = cosines(left, right, rows[once], cols[at[once]], memory, check_cancelled)
    if mirrored.any():
        again = np.flatnonzero(mirrored)
        pairs = np.flatnonzero(~mirrored & (cols[at] != rows))
        exact[again[np.lexsort((rows[again], cols[at[again]]))]] = exact[pairs]
    least = (np.abs(exact) if selection.absolute else exact) >= selection.threshold
    found.settle(at, exact, least)


# Maximum number of threads of a check. With two threads per core, one can compute while
# the other reads from the disk.
_MAX_THREADS = 8


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. Its truth value is `ok`.

    The check divides the columns of C into groups. In each row and group, it multiplies the elements by
    random signs, and sums them. It compares these sums with the same sums for the product.

    Attributes:
        ok: whether C is the product within rounding error.
        shape: shape of C.
        rows, cols: ranges of rows and columns that contain every error in C; None if there is no error.
        wrong_rows: number of rows with errors.
        excess: largest ratio of the error of a sum to its tolerance; the error itself if the tolerance is 0;
            infinite if an Inf or NaN is wrong.
        miss_probability: upper bound on the probability that errors in a row and group cancel in all sums,
            so that the check misses them.
        tolerance: largest tolerance of any sum. The only wrong element in a row and group is always found if
            its error exceeds twice this value.
        bound: name of the model of rounding errors, "probabilistic" or "worst-case".
        false_alarm: upper bound on the probability that a correct C fails, by that model.
        instead: other transposes or orders of A and B that also give the product C's shape, as texts.
        vectors: number of random vectors per group. Each gives one sum per row.
        groups: number of groups.
        seed: seed of the random vectors.
        seconds: wall time.
        bytes: bytes read.
        uplo: the triangle of C that was checked, "lower" or "upper"; "full" if all of C was.
        half: the triangle that is correct, "lower" or "upper", if all of a Gram matrix was checked, and only
            this triangle of it is; "" in other cases.
    """

    ok: bool
    shape: tuple[int, int]
    rows: Range | None
    cols: Range | None
    wrong_rows: int
    excess: float
    miss_probability: float
    tolerance: float
    bound: str
    false_alarm: float
    instead: tuple[str, ...]
    vectors: int
    groups: int
    seed: int
    seconds: float
    bytes: int
    uplo: str = "full"
    half: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def message(self) -> str:
        """Whether C is correct; if not, where it is wrong, by how much, and what to do."""
        if self.rows is None or self.cols is None:
            return "C is correct" if self.uplo == "full" else f"the {self.uplo} triangle of C is correct"
        excess = f"by up to {self.excess:.3g} times the rounding error"
        if self.tolerance == 0:
            excess = f"in sums by up to {self.excess:.3g}, where nothing is rounded"
        where = (
            f"C[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}] is wrong: "
            f"{self.wrong_rows} of these rows hold elements that differ from the "
            f"product{', ' + excess if isfinite(self.excess) else ' by an Inf or NaN'}"
        )
        if not self.half and self.wrong_rows == self.shape[0] > 1 and self.cols == (0, self.shape[1]):
            fitting = f"; the shapes also fit with {' or '.join(self.instead)}" if self.instead else ""
            return (
                f"{where}. All rows are wrong: check that A and B are the operands that C was computed from, "
                "in this order, and that --transpose-a, --transpose-b, --alpha and --beta are those of the "
                f"run{fitting}"
            )
        remedy = "with --overwrite (if beta is not 0, from a copy of the old C) and --verify"
        if self.half:
            other = {"lower": "above", "upper": "below"}[self.half]
            return (
                f"{where}. Its {self.half} triangle is correct: if elements {other} the diagonal are not "
                f"used, check only the others, with --gram {self.half} (gram={self.half!r})"
            )
        return f"{where}. Compute it again {remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and `message` as a dict for JSON. Numbers that are not finite become None."""
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in (asdict(self) | {"message": self.message}).items()
        }


def verify(  # noqa: PLR0915  a sequence of checks
    a: Operand,
    b: Operand,
    c: Operand,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    c_before: Operand | None = None,
    trans_a: Transpose = Op.N,
    trans_b: Transpose = Op.N,
    compute: str = "native",
    transform_a: Transform | None = None,
    transform_b: Transform | None = None,
    decode: bool = True,
    host_memory: Size | None = None,
    bound: str = "probabilistic",
    seed: int = 0,
    gram: str | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Verification:
    """Check that ``c = alpha op(a) @ op(b) + beta c_before`` within rounding error, in bounded memory.

    The method is Freivalds' (1977): it compares c @ x with op(a) @ (op(b) @ x) for random vectors x of signs.
    If C is correct, each array is read once. Only b may be read more often, if memory is small or if b has
    Inf or NaN. If C is wrong, the arrays are read again to find the wrong columns.

    Args:
        a, b, c: as for `gemm`. Any program may have computed c.
        alpha, beta, trans_a, trans_b, compute, transform_a, transform_b, decode: as for `gemm`. If a
            transform needs means, its operand is read once more, unless they are cached (`oocgemm.stats`).
        c_before: C before the run; required if beta is not 0.
        host_memory: upper bound on memory, in bytes or as "2GiB"; half of the available RAM by default. More
            memory makes the check finer: it finds smaller errors.
        bound: model of rounding errors. "probabilistic" assumes that they are independent and of mean 0;
            "worst-case" assumes nothing, and finds large errors only.
        seed: seed of the random signs.
        gram: "lower" or "upper" if only this triangle of c is stored, as by `oocgemm.gram`. Then the
            other triangle, also of c_before, is taken as its conjugate transpose. "full" if all of c is
            stored. None (default): what the run has recorded in c, or "full".
        say: called with a text that describes the progress, by one thread at a time.

    Returns:
        A `Verification`.

    Raises:
        InputError: operands or options cannot be used.
        BudgetError: the memory is too small for one block of an operand.
        ExecutionError: an operand cannot be read.
    """
    started = perf_counter()
    if bound not in BOUNDS:
        raise InputError(f"unknown bound {bound!r}: choose one of {', '.join(BOUNDS)}")
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    _check_genotypes((("A", a, transform_a), ("B", b, transform_b)) if decode else (), memory)
    if a is None or b is None or c is None:
        raise InputError("A, B and C are all needed, and one of them is None")
    left, right = stores.open_pair(
        ("A", stores.located("A", a)), ("B", stores.located("B", b)), decode=decode
    )
    result, before = (
        None if x is None else stores.open_matrix(name, stores.located(name, x), decode=decode)
        for name, x in (("C", c), ("the old C", c_before))
    )
    assert result is not None
    matrices = left, right, result, before
    if gram not in (None, *GRAMS):
        raise InputError(f"gram = {gram!r}: choose one of {', '.join(GRAMS)}")
    uplo = gram or recorded_uplo(result) or "full"
    # An error in a Gram matrix may be that only one triangle is stored.
    half = uplo == "full" and result.shape[0] == result.shape[1] and stores.same_place(left, right)
    if uplo != "full":
        result, before = _mirrored(result, uplo), before and _mirrored(before, uplo)
    ops = op_of("trans_a", trans_a), op_of("trans_b", trans_b)
    if any(x is not None and x.corrects for x in (transform_a, transform_b)):
        # Centers that were subtracted from C are subtracted from the operands here.
        transform_a, transform_b = (
            replace(x or Transform(), cast="float64") for x in (transform_a, transform_b)
        )
    left = transformed(left, transform_a, ops[0], left=True)
    right = transformed(right, transform_b, ops[1], left=False)
    left, right = as_multiplied(left, right)
    name = result.dtype.name
    out_dtype = name if name in DTYPES[left.dtype.name].results else None
    instead = fitting(left.shape, right.shape, result.shape, (ops[0].swaps, ops[1].swaps))
    hint = f"; the shapes fit with {' or '.join(instead)}" if instead else ""
    try:
        problem = problem_of(left, right, alpha, beta, trans_a, trans_b, compute, out_dtype)
    except InputError as error:
        raise InputError(f"{error}{hint if 'shapes' in str(error) else ''}") from error
    _check(problem, result, before, hint)
    check_complete(*(x for x in matrices if x is not None))
    if problem.depth:
        left, right = readable(left, memory), readable(right, memory)
    operands = CheckedProduct(
        Oriented(left, problem.trans_a.swaps, problem.trans_a is Op.C),
        Oriented(right, problem.trans_b.swaps, problem.trans_b is Op.C),
        Oriented(result),
        Oriented(before) if before is not None and problem.updates_c else None,
    )
    threads = min(_MAX_THREADS, THREADS_PER_CORE * len(os.sched_getaffinity(0)))
    transposed = operands.transposed()
    blocks = cut(problem, operands, memory, threads)
    transposed_blocks = cut(problem, transposed, memory, blocks.threads, groups=1)
    with ThreadPoolExecutor(blocks.threads, thread_name_prefix="oocgemm-verify") as pool:
        passes = Passes(pool, blocks.threads, blocks.piece, say)
        found = Check(problem, operands, (0, problem.n), blocks, passes, (seed, 0), bound).run()
        rows, cols, bytes_read = None, None, passes.bytes
        if found.wrong.any():
            rows, near = (hull(np.logical_or.reduce(found.wrong, axis)) for axis in (1, 0))
            cols = near[0] * blocks.group, min(near[1] * blocks.group, problem.n)
            second = Passes(pool, transposed_blocks.threads, transposed_blocks.piece, say)
            again = Check(problem, transposed, rows, transposed_blocks, second, (seed, 1), bound).run()
            bytes_read += second.bytes
            inside = again.wrong[cols[0] : cols[1], 0]
            if inside.any():
                start, stop = hull(inside)
                cols = cols[0] + start, cols[0] + stop
        found_half = ""
        if rows is not None and half and ops[0].swaps != ops[1].swaps:
            for triangle in ("lower", "upper"):
                third = Passes(pool, blocks.threads, blocks.piece, say)
                part = _half(operands, triangle)
                tried = Check(problem, part, (0, problem.n), blocks, third, (seed, 0), bound).run()
                bytes_read += third.bytes
                found_half = found_half or ("" if tried.wrong.any() else triangle)
    return Verification(
        ok=rows is None,
        shape=(problem.m, problem.n),
        rows=rows,
        cols=cols,
        wrong_rows=int(found.wrong.any(axis=1).sum()),
        excess=found.excess,
        miss_probability=2.0**-VECTORS,
        tolerance=found.tolerance,
        bound=bound,
        false_alarm=FALSE_ALARM,
        instead=instead,
        vectors=VECTORS,
        groups=ceil_div(problem.n, blocks.group),
        seed=seed,
        seconds=perf_counter() - started,
        bytes=bytes_read,
        uplo=uplo,
        half=found_half,
    )


def _mirrored(matrix: Matrix, triangle: str) -> Matrix:
    return MirroredMatrix(matrix, upper=triangle == "upper")


def _half(operands: CheckedProduct, triangle: str) -> CheckedProduct:
    """Return the operands with one triangle of C, and of the old C, mirrored into the other triangle."""
    result, before = (
        x and Oriented(_mirrored(x.matrix, triangle)) for x in (operands.result, operands.before)
    )
    assert result is not None
    return replace(operands, result=result, before=before)


def _check_genotypes(operands: Iterable[tuple[str, Any, Transform | None]], memory: int) -> None:
    """Raise `InputError` if a product of operands would have codes of missing genotypes in a .bed file."""
    for name, operand, transform in operands:
        check_known(name, operand, transform, lambda: memory, how_to_replace(name))


def fitting(
    a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], given: tuple[bool, bool]
) -> tuple[str, ...]:
    """Return other transposes and orders of A and B with which the product has C's shape, as texts.

    `a`, `b` and `c` are the shapes of the stored matrices. `given` tells whether the caller transposes A,
    and whether B; this combination is not returned.

    >>> fitting((4, 3), (4, 5), (3, 5), (False, False))
    ('--transpose-a',)
    >>> fitting((3, 3), (3, 3), (3, 3), (True, False))
    ('no --transpose', '--transpose-b', '--transpose-a --transpose-b', 'A and B swapped')
    """
    found = []
    for swaps in product((False, True), repeat=2):
        left, right = (x[::-1] if swap else x for x, swap in zip((a, b), swaps, strict=True))
        if swaps != given and left[1] == right[0] and (left[0], right[1]) == c:
            names = [f"--transpose-{name}" for name, swap in zip("ab", swaps, strict=True) if swap]
            found.append(" ".join(names) or "no --transpose")
    left, right = (x[::-1] if swap else x for x, swap in zip((b, a), given[::-1], strict=True))
    if left[1] == right[0] and (left[0], right[1]) == c:
        found.append("A and B swapped")
    return tuple(found)


def _check(problem: GemmProblem, result: Matrix, before: Matrix | None, hint: str) -> None:
    """Raise `InputError` unless C and the old C fit the product. `hint` ends a message on shapes."""
    wanted = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    for matrix in (result, before):
        if matrix is not None and (matrix.shape, matrix.dtype) != wanted:
            raise InputError(
                f"{matrix.name} has shape {matrix.shape} and dtype {matrix.dtype}, the product has shape "
                f"{wanted[0]} and dtype {wanted[1]}: pass the operands of this "
                f"C{hint if matrix.shape != wanted[0] else ''}"
            )
    if problem.updates_c and before is None:
        raise InputError(
            f"beta = {problem.beta}: the check needs C from before the run, pass it as c_before (--c-before)"
        )
    if before is not None and stores.same_place(result, before):
        raise InputError("C and the old C are the same array: pass a copy that was made before the run")
