"""Verify C = alpha op(A) op(B) + beta C0 by Freivalds' algorithm. C0 is the old content of C.

Source: Freivalds, *Probabilistic machines can use less running time* (1977). For a correct C and any vector
y,

    C y  =  alpha op(A) (op(B) y) + beta C0 y

The columns of C are divided into groups. For each group there are several vectors y, with random signs (+1 or
-1) on the columns of the group and zeros elsewhere. A vector takes m k + k n + m n multiplications, and the
whole product m n k.

If a row of C is wrong within a group, each vector detects it with a probability of at least 1/2. If only one
element of the row is wrong, every vector detects it. Differences below the tolerance
(`oocgemm.integrity.tolerance`) count as rounding errors and pass. To find the wrong columns, the caller then
checks the transposed product.

To limit the memory, rows of C and indices along k are processed in blocks::

    for each block of rows of C:
        for each block of k:
            sums = op(B)[block of k] y
            expected[rows] += op(A)[rows, block of k] sums
        compare C[rows] y with expected[rows]

If there is only one block of k, `sums` is computed once. Otherwise op(B) is read once per block of rows. The
other matrices are read once.

If a row of op(A) or a column of op(B) has an Inf or NaN, the whole row or column of C must be nonfinite. All
other elements of C must be finite, unless C0 is nonfinite there or a sum could have overflowed.

If the check finds a column of op(B) with nonfinite elements, it starts again, and excludes this column from
the sums.
"""

import threading
from dataclasses import dataclass
from math import isfinite

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.backends.checksums import VECTORS, SignVectors
from oocgemm.integrity.blocks import Blocks, Operands
from oocgemm.integrity.passes import Passes
from oocgemm.integrity.rounding import wide_dtype
from oocgemm.integrity.sign_sums import Rows, Sums, bias_of, product, row_norms
from oocgemm.integrity.tolerance import SumTolerance
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import Range

# States of columns of op(B) that contain an Inf or NaN. _NEW: found by the current attempt to compare C with
# the product. _KNOWN: found by an earlier attempt, and now excluded from the sums.
_KNOWN, _NEW = 1, 2


@dataclass
class Found:
    """The result of one check of C.

    Attributes:
        wrong: flags of shape (rows, groups): the row differs from the product in this group of columns.
        excess: the largest ratio of an error to its tolerance. It is infinite if an element of C is
            nonfinite that must be finite, or finite that must be nonfinite.
        tolerance: the largest tolerance of any sum.
    """

    wrong: Array
    excess: float
    tolerance: float


class Check:
    """One check of the columns `cols` of C by Freivalds' algorithm, which finds the wrong rows.

    To find the wrong columns instead, pass `Operands.transposed()`: C^T is then checked, and `cols` are rows
    of C. `bound` chooses the error bound, one of `tolerance.BOUNDS`.
    """

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
        """Compare C with the product of the operands.

        If columns of op(B) have an Inf or NaN, the comparison is repeated without these columns.
        """
        found = Found(np.zeros((self._m, self._groups), bool), 0.0, 0.0)
        if self._m == 0 or self._cols[0] == self._cols[1]:
            return found
        with np.errstate(all="ignore"):
            while not self._attempt(found):
                found = Found(np.zeros_like(found.wrong), 0.0, 0.0)
                self._excluded[self._excluded == _NEW] = _KNOWN
        return found

    def _attempt(self, found: Found) -> bool:
        """Compare all rows of C with the product, and return True.

        If a column of op(B) that is not yet excluded has an Inf or NaN, mark it `_NEW` and return False. The
        caller must then repeat the comparison without this column.
        """
        depth = self._blocks.depth
        spans = [(left, min(self._k, left + depth)) for left in range(0, self._k, depth)]
        sums = None
        for top in range(0, self._m, self._blocks.rows):
            rows = Rows((top, min(self._m, top + self._blocks.rows)), self._groups, self._wide)
            for span in spans:
                if sums is None or len(spans) > 1:
                    sums = None  # free the old sums before the new ones are allocated
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
        """Compute `sums.values` and `sums.norms` from the rows `sums.span` of op(B).

        If a column of op(B) has an Inf or NaN, mark it `_NEW` in `_excluded`. `sums` is then incomplete
        and must not be used.
        """
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
        """Add op(A) times `sums.values` to `rows.expected`, for the indices `sums.span` along k.

        Also update `rows.terms` and `rows.bias`, which determine the error bound.
        """

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
        """Compare C y - beta C0 y with alpha op(A) op(B) y, for the rows in `rows` and all sign vectors y.

        Store in `found` which of these rows are wrong, and update its `excess` and `tolerance`.
        """
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
        """Return the random signs of a range of columns: shape (columns, VECTORS).

        Each thread caches its last result, because it often gets the same columns again.
        """
        if getattr(self._drawn, "cols", None) != cols:
            self._drawn.cols, self._drawn.signs = cols, self._signs.part(*cols)
        signs: Array = self._drawn.signs
        return signs

    def _group(self, cols: Range) -> int:
        """Return the index of the group that contains a range of columns."""
        return int((cols[0] - self._cuts[0]) // self._blocks.group)


def _without_nonfinite(
    found: Array,
    before: Array | None,
    nonfinite: Array,
    tolerance: SumTolerance,
    overflow: Array,
    too_large: Array,
) -> tuple[Array, Array | None, Array, Array]:
    """Replace nonfinite elements of a block of C by zeros, and check their positions.

    Args:
        found, before: the block of C, and the same block of the old C.
        nonfinite: flags of the elements whose row of op(A) or column of op(B) has an Inf or NaN.
        overflow: flags of the elements that may be Inf or NaN, because a sum could have overflowed.
        too_large: flags of the elements that may be Inf, because they could exceed C's dtype.

    Returns:
        - `found` and `before`, with zeros for elements that cannot be compared;
        - flags of the rows with an element that is wrongly finite or wrongly nonfinite;
        - flags of the elements that were replaced by zeros.
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
    """Return the slice of the columns of one group in `Sums.values` or `Rows.expected`.

    These arrays have `VECTORS` columns per group, one per sign vector.
    """
    return slice(group * VECTORS, (group + 1) * VECTORS)


def hull(which: Array) -> Range:
    """Return the smallest range of indices (start, stop) that contains all set flags."""
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1
