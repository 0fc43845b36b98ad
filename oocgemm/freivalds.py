"""Freivalds' check of a product, streamed in one pass over each operand.

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

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.bounds import Rounding, block_norms, block_squares, wide_dtype
from oocgemm.errors import BudgetError
from oocgemm.plan import GemmProblem
from oocgemm.plan.tiling import Span, ceil_div
from oocgemm.stores import Matrix, pieces
from oocgemm.units import format_size

VECTORS = 8  # for each group of columns
# Columns of a group: the fewer, the smaller are the errors that show, and the more work there is.
GROUP = 1024
PIECE = 1 << 19  # elements that a thread holds at a time, but for whole chunks that must be decoded


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
class Operands:
    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    def transposed(self) -> "Operands":
        """The same product, rows and columns of C in each other's place."""
        before = self.before.transposed() if self.before else None
        return Operands(self.right.transposed(), self.left.transposed(), self.result.transposed(), before)


def group_size(problem: GemmProblem, operands: Operands, memory: int, threads: int) -> int:
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
class Found:
    """Which rows of C are wrong in which groups of columns, how far over its tolerance the worst is, and the largest
    tolerance."""

    wrong: Array
    excess: float
    tolerance: float


class Check:
    """The check itself, for a product in either orientation."""

    def __init__(
        self,
        problem: GemmProblem,
        pool: ThreadPoolExecutor,
        seed: int,
        say: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._problem = problem
        self._pool = pool
        self._say = say
        self._random = np.random.default_rng(seed)
        self._wide = wide_dtype(numpy_dtype(problem.acc_dtype))
        self._lock = threading.Lock()  # for multiplying too: the BLAS has threads of its own
        self.bytes = 0

    def run(self, x: Operands, cols: Span, size: int) -> Found:
        """Hold C's rows against the operands', over these columns in groups of that size."""
        (m, n), k = x.result.shape, x.left.shape[1] if self._problem.depth else 0
        cuts = [*range(cols[0], cols[1], size), cols[1]]
        if m == 0 or cols[0] == cols[1]:
            return Found(np.zeros((m, max(0, len(cuts) - 1)), bool), 0.0, 0.0)
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
        x: Operands,
        cuts: list[int],
        y: Array,
        rounding: Rounding,
        wanted: Array,
        bound: Array,
        spoiled: tuple[Array, Array],
    ) -> Found:
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
        return Found(wrong, worst, float(tolerance[decided].max(initial=0)))

    def _each(self, x: Oriented, rows: Span, cols: Span, act: Callable[[Span, Span, Array], None]) -> None:
        """Read a block of a matrix in parts, call `act` with each of them in several threads, and say how far it is."""
        if rows[0] == rows[1] or cols[0] == cols[1]:
            return

        def one(block: tuple[Span, Span]) -> int:
            read = x.read(*block)
            with np.errstate(all="ignore"):
                act(*block, read)
            return read.size

        itemsize = x.matrix.dtype.itemsize
        done, total = 0, (rows[1] - rows[0]) * (cols[1] - cols[0]) * itemsize
        for elements in self._pool.map(one, x.blocks(rows, cols)):
            done += elements * itemsize
            self._say(f"reading {x.matrix.name}, {100 * done // total}% of {format_size(total)}")
        self.bytes += done


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
    """2-norms of the rows of a double-precision block."""
    blocks = np.ascontiguousarray(block)[:, None, :]
    return block_norms(blocks, block_squares(blocks))


def hull(which: Array) -> Span:
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1
