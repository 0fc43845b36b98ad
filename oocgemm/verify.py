"""Whether a C on disk is the product that it is said to be: Freivalds' check, streamed in one pass over each operand.

After Freivalds, *Probabilistic machines can use less running time* (1977). The columns of C are taken in groups. With
vectors y of random signs on the columns of a group, and nothing on the others,

    C y  =  alpha op(A) (op(B) y) + beta C0 y

which costs m k + k n + m n multiplications a vector in place of m n k. If a row of C is wrong within a group, the two
sides differ there with a probability of at least 1/2 for each vector, and always if only one element of it is. What
rounding explains (`oocgemm.bounds`, in double precision whatever the operands) is no difference: elements that are wrong
by less than the tolerance pass. Where rows differ, the same is done once more with rows and columns in each other's place
and signs on the wrong rows only, which tells the wrong columns.

An Inf or NaN in a row of op(A) or a column of op(B) must be one in all of that row or column of C, and no other may be
there unless a sum could have overflowed. Columns with one in op(B) are left out of the sums: they are looked for in a
second pass over op(B), which only such operands need.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np

from oocgemm import job, stores
from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.backends.memory import available_memory
from oocgemm.bounds import Rounding, block_norms, wide_dtype
from oocgemm.errors import BudgetError, InputError
from oocgemm.job import Size, Transpose
from oocgemm.plan import GemmProblem, Op
from oocgemm.plan.tiling import Span, ceil_div
from oocgemm.resume import check_whole
from oocgemm.stores import Matrix, pieces
from oocgemm.units import format_size, parse_size

VECTORS = 8  # for each group of columns
GROUP = (
    1024  # columns of a group: the fewer, the smaller are the errors that show, and the more work there is
)
THREADS = 8
PIECE = 1 << 19  # elements that a thread holds at a time, but for whole chunks that must be decoded


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
) -> Verification:
    """Whether ``c = alpha op(a) @ op(b) + beta c_before``, but for rounding; all of them read once, in bounded memory.

    Args:
        a, b, c: as for `gemm`; c is the result, by whatever program.
        alpha, beta, trans_a, trans_b, compute: as for `gemm`.
        c_before: what C was before; needed if beta is not 0.
        host_memory: bound on the memory taken, in bytes or as "2GiB"; half of what is available by default. Fewer
            columns fit into a group with more of it, which lets smaller errors show.
        seed: of the random signs.

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
    problem = job.problem_of(left, right, alpha, beta, trans_a, trans_b, compute)
    if result.dtype == numpy_dtype(problem.acc_dtype):
        problem = replace(problem, c_dtype=problem.acc_dtype)
    _check(problem, result, before)
    check_whole(*(x for x in matrices if x is not None))
    threads = max(1, min(THREADS, len(os.sched_getaffinity(0))))
    operands = _Operands(
        Oriented(left, problem.trans_a.swaps, problem.trans_a is Op.C),
        Oriented(right, problem.trans_b.swaps, problem.trans_b is Op.C),
        Oriented(result),
        Oriented(before) if before is not None and problem.reads_c else None,
    )
    memory = available_memory() // 2 if host_memory is None else parse_size(host_memory)
    size = _group_size(problem, operands, memory, threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-verify") as pool:
        check = _Check(problem, pool, seed, memory)
        found = check.run(operands, (0, problem.n), size)
        rows = cols = None
        if found.wrong.any():
            rows, near = (_hull(np.logical_or.reduce(found.wrong, axis)) for axis in (1, 0))
            cols = near[0] * size, min(near[1] * size, problem.n)
            again = check.run(operands.transposed(), rows, rows[1] - rows[0])
            inside = again.wrong[cols[0] : cols[1], 0]
            if inside.any():
                start, stop = _hull(inside)
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


@dataclass(frozen=True)
class Oriented:
    """A stored matrix, transposed and conjugated on the fly."""

    matrix: Matrix
    swapped: bool = False
    conjugate: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.matrix.shape
        return (cols, rows) if self.swapped else (rows, cols)

    def transposed(self) -> "Oriented":
        return replace(self, swapped=not self.swapped)

    def blocks(self, rows: Span, cols: Span) -> Iterable[tuple[Span, Span]]:
        """A block cut as it is best read."""
        stored = (cols, rows) if self.swapped else (rows, cols)
        layout = self.matrix.layout
        height, width = layout.read_chunk
        if layout.partial_reads and (height, width) != (1, 1):
            height = max(1, min(height, PIECE // width))
        for r, c in pieces(
            *stored, (height, width), min(PIECE, max(1, self.matrix.shape[0] * self.matrix.shape[1]))
        ):
            yield (c, r) if self.swapped else (r, c)

    def read(self, rows: Span, cols: Span) -> Array:
        """A block, in double precision."""
        stored = (cols, rows) if self.swapped else (rows, cols)
        (r0, r1), (c0, c1) = stored
        block = np.empty((r1 - r0, c1 - c0), self.matrix.dtype)
        self.matrix.read(*stored, block)
        wide = block.astype(wide_dtype(block.dtype), copy=False)
        wide = wide.T if self.swapped else wide
        return wide.conj() if self.conjugate else wide

    @property
    def largest(self) -> int:
        """Elements of the largest block, about."""
        height, width = self.matrix.layout.read_chunk
        return max(PIECE, 0 if self.matrix.layout.partial_reads else height * width)


@dataclass(frozen=True)
class _Operands:
    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    def transposed(self) -> "_Operands":
        """The same product, rows and columns of C in each other's place."""
        before = self.before.transposed() if self.before else None
        return _Operands(self.right.transposed(), self.left.transposed(), self.result.transposed(), before)


def _group_size(problem: GemmProblem, operands: _Operands, memory: int, threads: int) -> int:
    """Columns of a group: `GROUP`, or as many more as it takes to stay within the memory."""
    wide = wide_dtype(numpy_dtype(problem.acc_dtype)).itemsize
    largest = max(x.largest for x in (operands.left, operands.right, operands.result))
    # A block is held as read, in double precision, and as absolute values, finite ones or a difference.
    scratch = threads * largest * 4 * wide
    # For B y and its norms, and for what C y is to be, its own norms and which are wrong.
    group = (problem.k + 2 * problem.m) * (VECTORS * wide + 24)
    fitting = (memory - scratch) // max(1, group)
    if fitting < 1:
        least = scratch + group
        raise BudgetError(
            f"verifying takes at least {format_size(least)}, --host-memory is {format_size(memory)}: give it more",
            least=least,
        )
    count = max(1, min(ceil_div(problem.n, GROUP), fitting))
    return max(1, ceil_div(problem.n, count))


@dataclass
class _Found:
    """Which rows of C are wrong in which groups of columns, how far over its tolerance the worst is, and the largest
    tolerance."""

    wrong: Array
    excess: float
    tolerance: float


class _Check:
    """The check itself, for a product in either orientation."""

    def __init__(self, problem: GemmProblem, pool: ThreadPoolExecutor, seed: int, memory: int) -> None:
        self._problem = problem
        self._pool = pool
        self._random = np.random.default_rng(seed)
        self._wide = wide_dtype(numpy_dtype(problem.acc_dtype))
        self._lock = threading.Lock()  # for multiplying too: the BLAS has threads of its own
        self.bytes = 0

    def run(self, x: _Operands, cols: Span, size: int) -> _Found:
        """Hold C's rows against the operands', over these columns in groups of that size."""
        (m, n), k = x.result.shape, x.left.shape[1] if self._problem.depth else 0
        cuts = [*range(cols[0], cols[1], size), cols[1]]
        if m == 0 or cols[0] == cols[1]:
            return _Found(np.zeros((m, max(0, len(cuts) - 1)), bool), 0.0, 0.0)
        y = self._random.integers(0, 2, (n, VECTORS), np.int8) * 2.0 - 1.0
        rounding = Rounding(self._problem, k + 2, k + 2 * size)
        with np.errstate(all="ignore"):
            sums, norms, spoiled_cols = self._right(x.right, k, cuts, y)
            wanted, bound, spoiled_rows = self._left(x.left, k, sums, norms)
            del sums, norms
            return self._result(x, cuts, y, rounding, wanted, bound, (spoiled_rows, spoiled_cols))

    def _right(self, x: Oriented, k: int, cuts: list[int], y: Array) -> tuple[Array, Array, Array]:
        """op(B) y for each group, the norms of its rows there, and the columns that hold an Inf or a NaN, left out."""
        spoiled = np.zeros(len(y), bool)
        while True:
            sums, norms, found = self._right_without(x, k, cuts, y, spoiled)
            if not found.any():
                return sums, norms, spoiled
            spoiled |= found

    def _right_without(
        self, x: Oriented, k: int, cuts: list[int], y: Array, left_out: Array
    ) -> tuple[Array, Array, Array]:
        """The same without some columns, and which others must be left out too."""
        groups = len(cuts) - 1
        sums, norms = np.zeros((k, groups * VECTORS), self._wide), np.zeros((k, groups))
        found = np.zeros(len(y), bool)
        some = left_out.any()

        def act(rows: Span, cols: Span, block: Array) -> None:
            at = slice(*rows)
            if some:
                block = np.where(left_out[slice(*cols)], 0, block)
            finite = np.isfinite(block)
            if not finite.all():
                with self._lock:
                    found[slice(*cols)] |= ~finite.all(axis=0)
                return
            for group, inside, part in _parts(cuts, cols, block):
                size = _row_norms(part)
                with self._lock:
                    sums[at, _vectors(group)] += part @ y[inside]
                    norms[at, group] = np.hypot(norms[at, group], size)

        self._each(x, (0, k), (cuts[0], cuts[-1]), act)
        return sums, norms, found

    def _left(self, x: Oriented, k: int, sums: Array, norms: Array) -> tuple[Array, Array, Array]:
        """op(A) of these, |op(A)| of the norms, and the rows that hold an Inf or a NaN."""
        m = x.shape[0]
        wanted, bound = np.zeros((m, sums.shape[1]), self._wide), np.zeros((m, norms.shape[1]))
        spoiled = np.zeros(m, bool)

        def act(rows: Span, cols: Span, block: Array) -> None:
            finite = np.isfinite(block)
            broken = None
            if not finite.all():
                broken, block = ~finite.all(axis=1), np.where(finite, block, 0)
            sizes = np.abs(block)
            with self._lock:
                wanted[slice(*rows)] += block @ sums[slice(*cols)]
                bound[slice(*rows)] += sizes @ norms[slice(*cols)]
                if broken is not None:
                    spoiled[slice(*rows)] |= broken

        self._each(x, (0, m), (0, k), act)
        return wanted, bound, spoiled

    def _result(
        self,
        x: _Operands,
        cuts: list[int],
        y: Array,
        rounding: Rounding,
        wanted: Array,
        bound: Array,
        spoiled: tuple[Array, Array],
    ) -> _Found:
        """C y beside what it is to be."""
        m, groups = bound.shape
        off = np.multiply(wanted, -rounding.alpha, out=wanted)
        stored, old = np.zeros((m, groups)), np.zeros((m, groups))
        wrong, undecided = np.zeros((m, groups), bool), np.zeros((m, groups), bool)
        overflow = rounding.may_overflow(bound, rounding.norm(bound, old))
        if not (isfinite(abs(rounding.alpha)) and isfinite(abs(rounding.beta))):
            overflow[0][...] = True

        def act(rows: Span, cols: Span, block: Array) -> None:
            at = slice(*rows)
            before = x.before.read(rows, cols) if x.before is not None else None
            for group, inside, found in _parts(cuts, cols, block):
                part, part_before, bad, lost = found, None, None, None
                if before is not None:
                    part_before = before[:, inside.start - cols[0] : inside.stop - cols[0]]
                spoils = spoiled[0][at, None] | spoiled[1][inside]
                if spoils.any() or not all(
                    np.isfinite(e).all() for e in (part, part_before) if e is not None
                ):
                    may = [which[at, group, None] for which in overflow]
                    part, part_before, bad, lost = _without(part, part_before, spoils, rounding, *may)
                    lost = np.logical_or.reduce(lost & ~spoiled[1][inside], 1)
                size = _row_norms(part)
                size_before = None if part_before is None else _row_norms(part_before)
                with self._lock:
                    off[at, _vectors(group)] += part @ y[inside]
                    stored[at, group] = np.hypot(stored[at, group], size)
                    if part_before is not None and size_before is not None:
                        off[at, _vectors(group)] -= rounding.beta * (part_before @ y[inside])
                        old[at, group] = np.hypot(old[at, group], size_before)
                    if bad is not None:
                        wrong[at, group] |= bad
                        undecided[at, group] |= lost

        self._each(x.result, (0, m), (cuts[0], cuts[-1]), act)
        tolerance = rounding.tolerance(rounding.norm(bound, old), stored, np.diff(cuts).astype(float))
        most = np.abs(off).reshape(m, groups, VECTORS).max(axis=2)
        decided = np.isfinite(most) & np.isfinite(tolerance) & ~undecided
        excess = np.where(decided, most / np.where(tolerance > 0, tolerance, 1), 0)
        worst = float("inf") if wrong.any() else float(excess.max(initial=0))
        wrong |= decided & (most > tolerance)
        return _Found(wrong, worst, float(tolerance[decided].max(initial=0)))

    def _each(self, x: Oriented, rows: Span, cols: Span, act: Callable[[Span, Span, Array], None]) -> None:
        """Read a block of a matrix in parts, and do something with each of them, several at a time."""
        if rows[0] == rows[1] or cols[0] == cols[1]:
            return

        def one(block: tuple[Span, Span]) -> int:
            read = x.read(*block)
            with np.errstate(all="ignore"):
                act(*block, read)
            return read.size

        done = sum(self._pool.map(one, x.blocks(rows, cols)))
        self.bytes += done * x.matrix.dtype.itemsize


def _without(
    found: Array, before: Array | None, spoiled: Array, rounding: Rounding, overflow: Array, too_large: Array
) -> tuple[Array, Array | None, Array, Array]:
    """A block of C, and of what it was, without elements that are no numbers or should be none; the rows with an Inf or a
    NaN where none may be, or none where one must; and what was left out."""
    there = ~np.isfinite(found)
    may = spoiled | overflow | (np.isinf(found) & too_large)
    lost = there | spoiled
    if before is not None:
        unknown = ~(np.abs(before) * abs(rounding.beta) < rounding.most)
        may, lost = may | unknown, lost | unknown
        before = np.where(lost, 0, before)
    must = spoiled & rounding.multiplies
    wrong = np.logical_or.reduce((there & ~may) | (must & ~there), 1)
    return np.where(lost, 0, found), before, wrong, lost


def _vectors(group: int) -> slice:
    """The sums of a group of columns among all of a row's."""
    return slice(group * VECTORS, (group + 1) * VECTORS)


def _parts(cuts: Sequence[int], cols: Span, block: Array) -> Iterable[tuple[int, slice, Array]]:
    """The columns of a block by groups: the group's number, its columns and their elements."""
    first = int(np.searchsorted(cuts, cols[0], "right")) - 1
    for group in range(first, len(cuts) - 1):
        start, stop = max(cuts[group], cols[0]), min(cuts[group + 1], cols[1])
        if start >= stop:
            return
        yield group, slice(start, stop), block[:, start - cols[0] : stop - cols[0]]


def _row_norms(block: Array) -> Array:
    return block_norms(np.ascontiguousarray(block)[:, None, :])


def _hull(which: Array) -> Span:
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1
