"""Freivalds' check of a product, streamed in one pass over each operand.

After Freivalds, *Probabilistic machines can use less running time* (1977). The columns of C are taken in groups. With
vectors y of random signs on the columns of a group, and nothing on the others,

    C y  =  alpha op(A) (op(B) y) + beta C0 y

which costs m k + k n + m n multiplications per vector in place of m n k. If a row of C is wrong within a group, the two
sides differ there with a probability of at least 1/2 for each vector, and always if only one element of it is wrong.
Differences within `oocgemm.integrity.tolerance` are rounding: smaller errors pass. Where rows differ, the check runs once more with
rows and columns swapped and signs on the wrong rows only, which gives the wrong columns.

Memory is bounded by blocks of rows and of k::

    for rows of C:
        for a block of k:
            sums = op(B)[block] y               kept if there is one block of k only
            expected[rows] += op(A)[rows, block] sums
        compare C[rows] y with expected[rows]

With all rows, or all of k, in one block each array is read once. Otherwise op(B) is read once per block of rows. The
signs are drawn where they are used.

An Inf or NaN in a row of op(A) or a column of op(B) must be one in all of that row or column of C, and no other may be
there unless a sum could have overflowed. Columns with one in op(B) are left out of the sums: the check starts again once
they are known, which costs a second pass over op(B).
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
from oocgemm.integrity.sign_sums import Rows, Sums, lean_of, product, row_norms
from oocgemm.integrity.tolerance import SumTolerance
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import Span, ceil_div
from oocgemm.planning.units import format_size

# Columns of a group: the fewer, the smaller are the errors that show, and the more multiplications op(A) takes.
GROUP = 1024
# Multiplying a strip of op(A) by the sums of a group takes about as long as reading it: groups times the size of op(A) may be
# this share of all that is read.
MAX_SHARE = 1 / 2
# Rows and depth of a block, at least, where chunks do not ask for more.
MIN_BLOCK = 256
MIN_PIECE = 1 << 15
_KNOWN, _NEW = 1, 2  # columns that are left out of the sums, and those that must be from now on


@dataclass(frozen=True)
class Operands:
    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, n and k."""
        return *self.result.shape, self.left.shape[1]

    def transposed(self) -> "Operands":
        """The same product, rows and columns of C swapped."""
        before = self.before.transposed() if self.before else None
        return Operands(self.right.transposed(), self.left.transposed(), self.result.transposed(), before)

    def all(self) -> list[Oriented]:
        return [x for x in (self.left, self.right, self.result, self.before) if x is not None]


@dataclass(frozen=True)
class Blocks:
    """How a check is cut to stay within its memory: columns per group, rows and depth per block; threads, and elements
    that each reads at a time."""

    group: int
    rows: int
    depth: int
    threads: int
    piece: int


def cut(problem: GemmProblem, x: Operands, memory: int, threads: int, groups: int | None = None) -> Blocks:
    """Cut a check so that it takes at most `memory` bytes, of which a fixed part is held per thread.

    As many threads, groups and columns of the sums as fit are taken; `groups` limits the groups. Raises `BudgetError`.
    """
    m, n, k = x.shape
    k = k if problem.depth else 0
    wide = wide_dtype(numpy_dtype(problem.acc_dtype)).itemsize
    affordable = int(MAX_SHARE * (m * k + k * n + m * n) / max(1, m * k))
    worthwhile = ceil_div(
        n, max(GROUP, MIN_PIECE // max(1, min(m, k)))
    )  # strips have none of the borders inside
    groups = max(1, min(worthwhile, affordable, groups or affordable))
    # Per column: whether it is left out. Per row and group: whether it is wrong.
    fixed = n + m
    # Per group and row: expected sums and temporaries of them, norms, flags. Per group and k: sums, norms, squares.
    per_row, per_depth = 3 * VECTORS * wide + 128, VECTORS * wide + 24
    tall = max(MIN_BLOCK, x.left.chunk[0], x.result.chunk[0])
    deep = max(MIN_BLOCK, x.left.chunk[1], x.right.chunk[0])

    def scratch(threads: int, piece: int) -> int:
        pieces = max(y.piece_bytes(piece) for y in x.all()) + (x.before.piece_bytes(piece) if x.before else 0)
        # Strips as read and converted, their squares, their products with signs, sums or norms, and signs.
        return threads * (pieces + 8 * piece * wide + VECTORS * MAX_CUT_WIDTH * wide)

    piece = PIECE
    while piece > MIN_PIECE and scratch(threads, piece) > memory // 2:
        piece //= 2
    while threads > 1 and scratch(threads, piece) + fixed > memory // 2:
        threads -= 1
    held = scratch(threads, piece) + fixed
    least = held + per_row * min(m, tall) + per_depth * min(k, deep)
    if memory < least:
        raise BudgetError(
            f"verifying takes at least {format_size(least)}, --host-memory is {format_size(memory)}: pass --host-memory "
            f"{ceil_div(least, 1 << 20)}MiB",
            least=least,
        )
    free = memory - held
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
    """Which rows of C are wrong in which groups of columns, how far over its tolerance the worst is, and the largest
    tolerance."""

    wrong: Array
    excess: float
    tolerance: float


class Check:
    """The check of a product in one orientation, over the columns `cols` of C in groups."""

    def __init__(
        self,
        problem: GemmProblem,
        x: Operands,
        cols: Span,
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
        self._left_out = np.zeros(self._n, np.int8)
        self._lock = threading.Lock()
        tests = self._m * self._groups * VECTORS
        self._tolerance = SumTolerance(problem, bound, self._k, min(blocks.group, cols[1] - cols[0]), tests)

    def run(self) -> Found:
        """Compare C with the operands."""
        found = Found(np.zeros((self._m, self._groups), bool), 0.0, 0.0)
        if self._m == 0 or self._cols[0] == self._cols[1]:
            return found
        with np.errstate(all="ignore"):
            while not self._attempt(found):
                found = Found(np.zeros_like(found.wrong), 0.0, 0.0)
                self._left_out[self._left_out == _NEW] = _KNOWN
        return found

    def _attempt(self, found: Found) -> bool:
        """Compare all rows. False as soon as all columns are known that must be left out, where there are new ones."""
        depth = self._blocks.depth
        spans = [(left, min(self._k, left + depth)) for left in range(0, self._k, depth)]
        sums = None
        for top in range(0, self._m, self._blocks.rows):
            rows = Rows((top, min(self._m, top + self._blocks.rows)), self._groups, self._wide)
            for span in spans:
                if sums is None or len(spans) > 1:
                    sums = None  # first, so that both are never there together
                    sums = Sums(span, self._groups, self._wide)
                    self._add_right(sums)
                if not (self._left_out == _NEW).any():
                    sums.square()
                    self._add_left(rows, sums)
            if (self._left_out == _NEW).any():
                return False
            rows.lean_at_last()
            self._compare(rows, found)
        return True

    def _add_right(self, sums: Sums) -> None:
        """op(B) y for each group, and the norms of its rows there."""
        left_out = self._left_out
        some = left_out.any()

        def act(rows: Span, cols: Span, x: Array, _: Array | None) -> None:
            at, group, which = (
                slice(rows[0] - sums.span[0], rows[1] - sums.span[0]),
                self._group(cols),
                slice(*cols),
            )
            if some and left_out[which].any():
                x = np.where(left_out[which] != 0, 0, x)
            found = product(x, self._signs_of(cols))
            if not np.isfinite(found).all():
                finite = np.isfinite(x)
                if not finite.all():
                    with self._lock:
                        left_out[which][~finite.all(axis=0)] = _NEW
                    return
            size = row_norms(x)
            with self._lock:
                sums.values[at, _vectors(group)] += found
                sums.norms[at, group] = np.hypot(sums.norms[at, group], size)

        self._passes.each(self._x.right, sums.span, self._cols, act, cuts=self._cuts, columns=VECTORS)

    def _add_left(self, rows: Rows, sums: Sums) -> None:
        """op(A) of the sums, and the norms of its terms."""

        def act(at_rows: Span, cols: Span, x: Array, _: Array | None) -> None:
            at = slice(at_rows[0] - rows.span[0], at_rows[1] - rows.span[0])
            inside = slice(cols[0] - sums.span[0], cols[1] - sums.span[0])
            values, terms, spoiled = sums.values[inside], sums.terms(x, inside), None
            found = product(x, values)
            if not (np.isfinite(found).all() and np.isfinite(terms).all()):
                finite = np.isfinite(x)
                if not finite.all():
                    spoiled, x = ~finite.all(axis=1), np.where(finite, x, 0)
                    found = product(x, values)
                terms = np.abs(x) @ sums.norms[inside]
            lean = lean_of(found, terms)
            with self._lock:
                rows.expected[at] += found
                rows.terms[at] = np.hypot(rows.terms[at], terms)
                rows.lean[at] += lean
                if spoiled is not None:
                    rows.spoiled[at] |= spoiled

        self._passes.each(self._x.left, rows.span, sums.span, act, columns=self._groups * VECTORS)

    def _compare(self, rows: Rows, found: Found) -> None:
        """C y beside what it should be."""
        tolerance, x = self._tolerance, self._x
        off = np.multiply(rows.expected, -tolerance.alpha, out=rows.expected)
        shape = rows.terms.shape
        stored, old = np.zeros(shape), np.zeros(shape)
        wrong, undecided = np.zeros(shape, bool), np.zeros(shape, bool)
        size = tolerance.product_norm(rows.terms)
        overflow = tolerance.may_overflow(size, tolerance.norm(size, old))
        if not (isfinite(abs(tolerance.alpha)) and isfinite(abs(tolerance.beta))):
            overflow[0][...] = True
        some = rows.spoiled.any() or self._left_out.any()

        def act(at_rows: Span, cols: Span, part: Array, before: Array | None) -> None:
            at, group, which = (
                slice(at_rows[0] - rows.span[0], at_rows[1] - rows.span[0]),
                self._group(cols),
                slice(*cols),
            )
            y, bad, lost = self._signs_of(cols), None, None
            change = product(part, y)
            if before is not None:
                change -= tolerance.beta * product(before, y)
            spoilt = some and (rows.spoiled[at].any() or self._left_out[which].any())
            if spoilt or not np.isfinite(change).all():
                spoils = rows.spoiled[at, None] | (self._left_out[which] != 0)
                may = [limit[at, group, None] for limit in overflow]
                part, before, bad, lost = _without(part, before, spoils, tolerance, *may)
                lost = np.logical_or.reduce(lost & (self._left_out[which] == 0), 1)
                change = product(part, y)
                if before is not None:
                    change -= tolerance.beta * product(before, y)
            norm = row_norms(part) if tolerance.needs_stored else None
            old_norm = None if before is None else row_norms(before)
            with self._lock:
                off[at, _vectors(group)] += change
                if norm is not None:
                    stored[at, group] = np.hypot(stored[at, group], norm)
                if old_norm is not None:
                    old[at, group] = np.hypot(old[at, group], old_norm)
                if bad is not None:
                    wrong[at, group] |= bad
                    undecided[at, group] |= lost

        self._passes.each(
            x.result, rows.span, self._cols, act, cuts=self._cuts, columns=VECTORS, beside=x.before
        )
        allowed = tolerance.of_sums(rows.terms, rows.lean, old, stored, np.diff(self._cuts).astype(float))
        most = np.abs(off).reshape(*shape, VECTORS).max(axis=2)
        decided = np.isfinite(most) & np.isfinite(allowed) & ~undecided
        excess = np.where(decided, most / np.where(allowed > 0, allowed, 1), 0)
        worst = float("inf") if wrong.any() else float(excess.max(initial=0))
        found.wrong[slice(*rows.span)] = wrong | (decided & (most > allowed))
        found.excess = max(found.excess, worst)
        found.tolerance = max(found.tolerance, float(allowed[decided].max(initial=0)))

    def _signs_of(self, cols: Span) -> Array:
        """The signs of a strip's columns. A thread meets strips of the same columns one after another."""
        if getattr(self._drawn, "cols", None) != cols:
            self._drawn.cols, self._drawn.signs = cols, self._signs.part(*cols)
        signs: Array = self._drawn.signs
        return signs

    def _group(self, cols: Span) -> int:
        """The group that a strip's columns are in."""
        return int((cols[0] - self._cuts[0]) // self._blocks.group)


def _without(
    found: Array,
    before: Array | None,
    spoiled: Array,
    tolerance: SumTolerance,
    overflow: Array,
    too_large: Array,
) -> tuple[Array, Array | None, Array, Array]:
    """A block of C, and of what it was, without elements that are no numbers or should be none; the rows with an Inf or a
    NaN where none may be, or none where one must; and what was left out."""
    there = ~np.isfinite(found)
    may = spoiled | overflow | (np.isinf(found) & too_large)
    lost = there | spoiled
    if before is not None:
        unknown = ~(np.abs(before) * abs(tolerance.beta) < tolerance.most)
        may, lost = may | unknown, lost | unknown
        before = np.where(lost, 0, before)
    must = spoiled & tolerance.multiplies
    wrong = np.logical_or.reduce((there & ~may) | (must & ~there), 1)
    return np.where(lost, 0, found), before, wrong, lost


def _vectors(group: int) -> slice:
    """The sums of a group of columns among all of a row's."""
    return slice(group * VECTORS, (group + 1) * VECTORS)


def hull(which: Array) -> Span:
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1
