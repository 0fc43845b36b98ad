"""Whether a C on disk is the product that it is said to be, and where it is not."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from oocgemm import job, stores
from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.memory import available_memory
from oocgemm.errors import InputError
from oocgemm.freivalds import VECTORS, Check, Operands, Oriented, group_size, hull
from oocgemm.job import Size, Transpose
from oocgemm.plan import DTYPES, GemmProblem, Op
from oocgemm.plan.tiling import Span, ceil_div
from oocgemm.resume import check_whole
from oocgemm.stores import Matrix
from oocgemm.units import parse_size

THREADS = 8


@dataclass(frozen=True)
class Verification:
    """What was found. `rows` and `cols` span all that is wrong in C, of which `wrong_rows` rows hold something; the worst
    sum was off by `excess` times its tolerance. An error in a row of a group of columns is missed with a probability of
    at most `missed`; a single element that is off by more than twice `tolerance` is seen wherever it is."""

    right: bool
    rows: Span | None
    cols: Span | None
    wrong_rows: int
    excess: float
    missed: float
    tolerance: float
    vectors: int
    groups: int
    seed: int
    seconds: float
    bytes: int

    @property
    def complaint(self) -> str:
        """Where C is wrong, by how much, and what to do."""
        if self.rows is None or self.cols is None:
            return "is right"
        far = f"by up to {self.excess:.3g} times what rounding explains"
        if self.tolerance == 0:
            far = f"in sums by up to {self.excess:.3g}, where nothing is rounded"
        return (
            f"is wrong in C[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}]: {self.wrong_rows} rows of it hold "
            f"elements that differ from the product{', ' + far if isfinite(self.excess) else ' by an Inf or NaN'}. Run it "
            "again, with --overwrite (or from what C was before, where beta is not 0), and with --verify"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is no finite number becomes null."""
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def verify(
    a: Any,
    b: Any,
    c: Any,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    c_before: Any = None,
    trans_a: Transpose = Op.N,
    trans_b: Transpose = Op.N,
    compute: str = "native",
    host_memory: Size | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda doing: None,
) -> Verification:
    """Whether ``c = alpha op(a) @ op(b) + beta c_before``, but for rounding; all of them read once, in bounded memory.

    Args:
        a, b, c: as for `gemm`; c is the result, by whatever program.
        alpha, beta, trans_a, trans_b, compute: as for `gemm`.
        c_before: what C was before; needed if beta is not 0.
        host_memory: bound on the memory taken, in bytes or as "2GiB"; half of what is available by default. With more
            of it groups have fewer columns, which lets smaller errors show.
        seed: of the random signs.
        say: called now and then with what is being read, and how far.

    Returns:
        A `Verification`.

    Raises:
        InputError: operands or options that cannot be used. BudgetError: not even one group of columns fits.
        ExecutionError: an operand cannot be read.
    """
    started = perf_counter()
    named = (("A", a), ("B", b), ("C", c), ("the C from before", c_before))
    matrices = [
        stores.open_matrix(name, stores.located(name, x)) if x is not None else None for name, x in named
    ]
    left, right, result, before = matrices
    if left is None or right is None or result is None:
        raise InputError("A, B and C are all needed")
    name = result.dtype.name
    out_dtype = name if name in DTYPES[left.dtype.name].results else None
    problem = job.problem_of(left, right, alpha, beta, trans_a, trans_b, compute, out_dtype)
    _check(problem, result, before)
    check_whole(*(x for x in matrices if x is not None))
    threads = max(1, min(THREADS, len(os.sched_getaffinity(0))))
    operands = Operands(
        Oriented(left, problem.trans_a.swaps, problem.trans_a is Op.C),
        Oriented(right, problem.trans_b.swaps, problem.trans_b is Op.C),
        Oriented(result),
        Oriented(before) if before is not None and problem.reads_c else None,
    )
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    size = group_size(problem, operands, memory, threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-verify") as pool:
        check = Check(problem, pool, seed, say)
        found = check.run(operands, (0, problem.n), size)
        rows = cols = None
        if found.wrong.any():
            rows, near = (hull(np.logical_or.reduce(found.wrong, axis)) for axis in (1, 0))
            cols = near[0] * size, min(near[1] * size, problem.n)
            again = check.run(operands.transposed(), rows, rows[1] - rows[0])
            inside = again.wrong[cols[0] : cols[1], 0]
            if inside.any():
                start, stop = hull(inside)
                cols = cols[0] + start, cols[0] + stop
    return Verification(
        right=rows is None,
        rows=rows,
        cols=cols,
        wrong_rows=int(found.wrong.any(axis=1).sum()),
        excess=found.excess,
        missed=2.0**-VECTORS,
        tolerance=found.tolerance,
        vectors=VECTORS,
        groups=ceil_div(problem.n, size),
        seed=seed,
        seconds=perf_counter() - started,
        bytes=check.bytes,
    )


def _check(problem: GemmProblem, result: Matrix, before: Matrix | None) -> None:
    """Raises `InputError` if C, or the C from before, cannot be of that product."""
    wanted = (problem.m, problem.n), numpy_dtype(problem.c_dtype)
    for matrix in (result, before):
        if matrix is not None and (matrix.shape, matrix.dtype) != wanted:
            raise InputError(
                f"{matrix.name} has shape {matrix.shape} and dtype {matrix.dtype}, the product has shape {wanted[0]} and "
                f"dtype {wanted[1]}: it is not of these operands"
            )
    if problem.reads_c and before is None:
        raise InputError(
            f"beta = {problem.beta}: C alone does not tell what it was made from. Give what it was before (--c-before)"
        )
    if before is not None and stores.same_place(result, before):
        raise InputError(
            "C and the C from before are the same array: give a copy that was made before the run"
        )
