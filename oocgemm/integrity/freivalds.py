"""Verify a product by Freivalds' algorithm, streamed in one pass over each operand.

Source: Freivalds, *Probabilistic machines can use less running time* (1977). The columns of C are divided
into groups. With vectors y of random signs on the columns of one group, and zeros elsewhere,

    C y  =  alpha op(A) (op(B) y) + beta C0 y

which takes m k + k n + m n multiplications per vector instead of m n k. If a row of C is wrong within a
group, each vector shows it with a probability of at least 1/2. If only one element of it is wrong, every
vector shows it. Differences within `oocgemm.integrity.tolerance` count as rounding, so smaller errors pass.
If rows differ, the check runs again with rows and columns swapped, and signs on the wrong rows only. This
gives the wrong columns.

Blocks of rows and of k bound the memory::

    for rows of C:
        for a block of k:
            sums = op(B)[block] y               reused if there is only one block of k
            expected[rows] += op(A)[rows, block] sums
        compare C[rows] y with expected[rows]

If one block has all rows, or all of k, each array is read once. Otherwise op(B) is read once per block of
rows. The signs are generated where they are used.

A nonfinite element in a row of op(A) or a column of op(B) must make all of that row or column of C nonfinite.
No other element may be nonfinite, unless a sum could have overflowed. Columns of op(B) with nonfinite
elements are excluded from the sums. When new ones are found the check restarts, which costs a second pass
over op(B).
"""

import threading
from dataclasses import dataclass
from math import isfinite

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.backends.random_words import VECTORS, SignVectors
from oocgemm.errors import BudgetError
from oocgemm.integrity.passes import MAX_CUT_WIDTH, PIECE, Oriented, Passes
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.integrity.sign_sums import Rows, Sums, bias_of, product, row_norms
from oocgemm.integrity.tolerance import SumTolerance
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.planning.units import format_size

# Columns per group. Smaller groups reveal smaller errors, and cost more multiplications with op(A).
GROUP = 1024
# To multiply a strip of op(A) by the sums of a group takes about as long as to read it. The number of groups
# times the size of op(A) is at most this share of all bytes read.
MAX_SHARE = 1 / 2
# Minimum rows and depth of a block. Larger chunks raise it.
MIN_BLOCK = 256
MIN_PIECE = 1 << 15
_KNOWN, _NEW = 1, 2  # columns excluded from the sums, and columns to exclude from the next attempt on


@dataclass(frozen=True)
class Operands:
    """The matrices of a product: op(A), op(B), C, and the old C if beta != 0."""

    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, n and k."""
        return *self.result.shape, self.left.shape[1]

    def transposed(self) -> "Operands":
        """Return the product with rows and columns of C swapped."""
        before = self.before.transposed() if self.before else None
        return Operands(self.right.transposed(), self.left.transposed(), self.result.transposed(), before)

    def all(self) -> list[Oriented]:
        """Return all matrices, without the old C if it is not read."""
        return [x for x in (self.left, self.right, self.result, self.before) if x is not None]


@dataclass(frozen=True)
class Blocks:
    """How a check is divided to fit into its memory.

    There are `group` columns per group, and `rows` and `depth` per block. Each of `threads` reads `piece`
    elements at a time.
    """

    group: int
    rows: int
    depth: int
    threads: int
    piece: int


def cut(problem: GemmProblem, x: Operands, memory: int, threads: int, groups: int | None = None) -> Blocks:
    """Divide a check so that it takes at most `memory` bytes.

    It gets as many threads, groups and rows of sums as fit. `groups` limits the number of groups. Raises
    `BudgetError`.
    """
    m, n, k = x.shape
    k = k if problem.depth else 0
    wide = wide_dtype(numpy_dtype(problem.acc_dtype)).itemsize
    affordable = int(MAX_SHARE * (m * k + k * n + m * n) / max(1, m * k))
    worthwhile = ceil_div(
        n, max(GROUP, MIN_PIECE // max(1, min(m, k)))
    )  # strips do not cross borders of groups
    groups = max(1, min(worthwhile, affordable, groups or affordable))
    # Per column: whether it is excluded. Per row and group: whether it is wrong.
    fixed = n + m
    # Per group and row: expected sums and temporaries of them, norms, flags. Per group and k: sums, norms,
    # squares.
    per_row, per_depth = 3 * VECTORS * wide + 128, VECTORS * wide + 24
    tall = max(MIN_BLOCK, x.left.chunk[0], x.result.chunk[0])
    deep = max(MIN_BLOCK, x.left.chunk[1], x.right.chunk[0])

    def scratch(threads: int, piece: int) -> int:
        pieces = max(y.piece_bytes(piece) for y in x.all()) + (x.before.piece_bytes(piece) if x.before else 0)
        # Strips as read and converted, their squares, their products with signs, sums or norms, and the
        # signs.
        return threads * (pieces + 8 * piece * wide + VECTORS * MAX_CUT_WIDTH * wide)

    piece = PIECE
    while piece > MIN_PIECE and scratch(threads, piece) > memory // 2:
        piece //= 2
    while threads > 1 and scratch(threads, piece) + fixed > memory // 2:
        threads -= 1
    taken = scratch(threads, piece) + fixed
    least = taken + per_row * min(m, tall) + per_depth * min(k, deep)
    if memory < least:
        raise BudgetError(
            f"verifying takes at least {format_size(least)}, --host-memory is {format_size(memory)}: "
            f"pass --host-memory {ceil_div(least, 1 << 20)}MiB",
            least=least,
        )
    free = memory - taken
    while True:
        rows_bytes, depth_bytes = per_row * groups + groups, per_depth * groups
        if m * rows_bytes + min(k, deep) * depth_bytes <= free:
            return _blocks(n, groups, m, (free - m * rows_bytes) // depth_bytes, deep, k, threads, piece)
        if k * depth_bytes + min(m, tall) * rows_bytes <= free:
            rows = (free - k * depth_bytes) // rows_bytes
            return _blocks(n, groups, rows // tall * tall or rows, k, deep, k, threads, piece)
        if groups == 1:
            break
        groups //= 2
    # The more rows in a block, the fewer passes over op(B).
    rows = (free - min(k, deep) * depth_bytes) // rows_bytes
    return _blocks(n, 1, max(1, rows // tall * tall or rows), min(k, deep), deep, k, threads, piece)


def _blocks(
    n: int, groups: int, rows: int, depth: int, deep: int, k: int, threads: int, piece: int
) -> Blocks:
    depth = k if depth >= k else depth // deep * deep or depth
    return Blocks(max(1, ceil_div(n, groups)), max(1, rows), max(1, depth), threads, piece)


@dataclass
class Found:
    """The rows of C that are wrong in each group of columns.

    `excess` is the worst ratio of error to tolerance, and `tolerance` the largest tolerance.
    """

    wrong: Array
    excess: float
    tolerance: float


class Check:
    """The check of a product in one orientation, over the columns `cols` of C in groups."""

    def __init__(
        self,
        problem: GemmProblem,
        x: Operands,
        cols: Range,
        blocks: Blocks,
        passes: Passes,
        seed: tuple[int, ...],
        bound: str,
    ) -> None:
        self._problem = problem
        self._x = x
        self._cols = cols
        self._blocks = blocks
        self._passes = passes
        (self._m, self._n), self._k = x.result.shape, x.left.shape[1] if problem.depth else 0
        self._cuts = [*range(cols[0], cols[1], blocks.group), cols[1]]
        self._groups = max(0, len(self._cuts) - 1)
        self._wide = wide_dtype(numpy_dtype(problem.acc_dtype))
        self._signs = SignVectors(*seed)
        self._drawn = threading.local()
        self._excluded = np.zeros(self._n, np.int8)
        self._lock = threading.Lock()
        tests = self._m * self._groups * VECTORS
        self._tolerance = SumTolerance(problem, bound, self._k, min(blocks.group, cols[1] - cols[0]), tests)

    def run(self) -> Found:
        """Compare C with the product of the operands."""
        found = Found(np.zeros((self._m, self._groups), bool), 0.0, 0.0)
        if self._m == 0 or self._cols[0] == self._cols[1]:
            return found
        with np.errstate(all="ignore"):
            while not self._attempt(found):
                found = Found(np.zeros_like(found.wrong), 0.0, 0.0)
                self._excluded[self._excluded == _NEW] = _KNOWN
        return found

    def _attempt(self, found: Found) -> bool:
        """Compare all rows. Return False once all columns to exclude are known, if there are new ones."""
        depth = self._blocks.depth
        spans = [(left, min(self._k, left + depth)) for left in range(0, self._k, depth)]
        sums = None
        for top in range(0, self._m, self._blocks.rows):
            rows = Rows((top, min(self._m, top + self._blocks.rows)), self._groups, self._wide)
            for span in spans:
                if sums is None or len(spans) > 1:
                    sums = None  # freed first, so that two never exist together
                    sums = Sums(span, self._groups, self._wide)
                    self._add_right(sums)
                if not (self._excluded == _NEW).any():
                    sums.square()
                    self._add_left(rows, sums)
            if (self._excluded == _NEW).any():
                return False
            rows.add_final_bias()
            self._compare(rows, found)
        return True

    def _add_right(self, sums: Sums) -> None:
        """Add op(B) y for each group, and the norms of op(B)'s rows there."""
        excluded = self._excluded
        some = excluded.any()

        def act(rows: Range, cols: Range, x: Array, _: Array | None) -> None:
            at, group, which = (
                slice(rows[0] - sums.span[0], rows[1] - sums.span[0]),
                self._group(cols),
                slice(*cols),
            )
            if some and excluded[which].any():
                x = np.where(excluded[which] != 0, 0, x)
            found = product(x, self._signs_of(cols))
            if not np.isfinite(found).all():
                finite = np.isfinite(x)
                if not finite.all():
                    with self._lock:
                        excluded[which][~finite.all(axis=0)] = _NEW
                    return
            size = row_norms(x)
            with self._lock:
                sums.values[at, _vectors(group)] += found
                sums.norms[at, group] = np.hypot(sums.norms[at, group], size)

        self._passes.each(self._x.right, sums.span, self._cols, act, cuts=self._cuts, columns=VECTORS)

    def _add_left(self, rows: Rows, sums: Sums) -> None:
        """Add op(A) times the sums, and the norms of its terms."""

        def act(at_rows: Range, cols: Range, x: Array, _: Array | None) -> None:
            at = slice(at_rows[0] - rows.span[0], at_rows[1] - rows.span[0])
            inside = slice(cols[0] - sums.span[0], cols[1] - sums.span[0])
            values, terms, nonfinite = sums.values[inside], sums.terms(x, inside), None
            found = product(x, values)
            if not (np.isfinite(found).all() and np.isfinite(terms).all()):
                finite = np.isfinite(x)
                if not finite.all():
                    nonfinite, x = ~finite.all(axis=1), np.where(finite, x, 0)
                    found = product(x, values)
                terms = np.abs(x) @ sums.norms[inside]
            bias = bias_of(found, terms)
            with self._lock:
                rows.expected[at] += found
                rows.terms[at] = np.hypot(rows.terms[at], terms)
                rows.bias[at] += bias
                if nonfinite is not None:
                    rows.nonfinite[at] |= nonfinite

        self._passes.each(self._x.left, rows.span, sums.span, act, columns=self._groups * VECTORS)

    def _compare(self, rows: Rows, found: Found) -> None:
        """Compare C y with its expected value."""
        tolerance, x = self._tolerance, self._x
        difference = np.multiply(rows.expected, -tolerance.alpha, out=rows.expected)
        shape = rows.terms.shape
        stored, old = np.zeros(shape), np.zeros(shape)
        wrong, undecided = np.zeros(shape, bool), np.zeros(shape, bool)
        size = tolerance.product_norm(rows.terms)
        overflow = tolerance.may_overflow(size, tolerance.norm(size, old))
        if not (isfinite(abs(tolerance.alpha)) and isfinite(abs(tolerance.beta))):
            overflow[0][...] = True
        some = rows.nonfinite.any() or self._excluded.any()

        def act(at_rows: Range, cols: Range, part: Array, before: Array | None) -> None:
            at, group, which = (
                slice(at_rows[0] - rows.span[0], at_rows[1] - rows.span[0]),
                self._group(cols),
                slice(*cols),
            )
            y, bad, replaced = self._signs_of(cols), None, None
            change = product(part, y)
            if before is not None:
                change -= tolerance.beta * product(before, y)
            affected = some and (rows.nonfinite[at].any() or self._excluded[which].any())
            if affected or not np.isfinite(change).all():
                nonfinite = rows.nonfinite[at, None] | (self._excluded[which] != 0)
                may = [limit[at, group, None] for limit in overflow]
                part, before, bad, replaced = _without_nonfinite(part, before, nonfinite, tolerance, *may)
                replaced = np.logical_or.reduce(replaced & (self._excluded[which] == 0), 1)
                change = product(part, y)
                if before is not None:
                    change -= tolerance.beta * product(before, y)
            norm = row_norms(part) if tolerance.needs_stored else None
            old_norm = None if before is None else row_norms(before)
            with self._lock:
                difference[at, _vectors(group)] += change
                if norm is not None:
                    stored[at, group] = np.hypot(stored[at, group], norm)
                if old_norm is not None:
                    old[at, group] = np.hypot(old[at, group], old_norm)
                if bad is not None:
                    wrong[at, group] |= bad
                    undecided[at, group] |= replaced

        self._passes.each(
            x.result, rows.span, self._cols, act, cuts=self._cuts, columns=VECTORS, beside=x.before
        )
        allowed = tolerance.of_sums(rows.terms, rows.bias, old, stored, np.diff(self._cuts).astype(float))
        largest = np.abs(difference).reshape(*shape, VECTORS).max(axis=2)
        decided = np.isfinite(largest) & np.isfinite(allowed) & ~undecided
        excess = np.where(decided, largest / np.where(allowed > 0, allowed, 1), 0)
        worst = float("inf") if wrong.any() else float(excess.max(initial=0))
        found.wrong[slice(*rows.span)] = wrong | (decided & (largest > allowed))
        found.excess = max(found.excess, worst)
        found.tolerance = max(found.tolerance, float(allowed[decided].max(initial=0)))

    def _signs_of(self, cols: Range) -> Array:
        """Return the signs of a strip's columns.

        They are cached: a thread's strips often have the same columns.
        """
        if getattr(self._drawn, "cols", None) != cols:
            self._drawn.cols, self._drawn.signs = cols, self._signs.part(*cols)
        signs: Array = self._drawn.signs
        return signs

    def _group(self, cols: Range) -> int:
        """Return the group of a strip's columns."""
        return int((cols[0] - self._cuts[0]) // self._blocks.group)


def _without_nonfinite(
    found: Array,
    before: Array | None,
    nonfinite: Array,
    tolerance: SumTolerance,
    overflow: Array,
    too_large: Array,
) -> tuple[Array, Array | None, Array, Array]:
    """Return blocks of C and of the old C with zeros for elements that are, or must be, nonfinite.

    Also return the rows that violate the rule for nonfinite elements, and the elements that were replaced.
    """
    actual = ~np.isfinite(found)
    may = nonfinite | overflow | (np.isinf(found) & too_large)
    replaced = actual | nonfinite
    if before is not None:
        unknown = ~(np.abs(before) * abs(tolerance.beta) < tolerance.max_finite)
        may, replaced = may | unknown, replaced | unknown
        before = np.where(replaced, 0, before)
    must = nonfinite & tolerance.multiplies
    wrong = np.logical_or.reduce((actual & ~may) | (must & ~actual), 1)
    return np.where(replaced, 0, found), before, wrong, replaced


def _vectors(group: int) -> slice:
    """Return the columns of sums that belong to a group."""
    return slice(group * VECTORS, (group + 1) * VECTORS)


def hull(which: Array) -> Range:
    """Return the smallest range that has all set flags."""
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1
