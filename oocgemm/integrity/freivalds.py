"""Verify C = alpha op(A) op(B) + beta C0 by Freivalds' algorithm. C0 is the old content of C.

Source: Freivalds, *Probabilistic machines can use less running time* (1977). For a correct C and any vector
y,

    C y  =  alpha op(A) (op(B) y) + beta C0 y

The columns of C are divided into groups. For each group there are several vectors y, with random signs (+1 or
-1) on the columns of the group and zeros elsewhere. A vector takes m k + k n + m n multiplications, and the
whole product m n k.

If a row of C is wrong within a group, each vector detects it with a probability of at least 1/2. If only one
element of the row is wrong, every vector detects it. Differences below the tolerance
(`oocgemm.integrity.rounding`) count as rounding errors and pass. To find the wrong columns, the caller then
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

*Chained products.* `check_chained` checks ``Z = X^T (X Q + 1 row)``. For vectors y of
random signs, Z y must be ``X^T (X (Q y) + 1 (row y))``. For this, X is read once more. A single wrong element
of Z is found with any signs, if its error is above the rounding error.

Rounding errors are taken to be independent and of mean 0 (Higham and Mary, 2019). With the roundoff u, a sum
of n terms then has an error of about u sqrt(n) times its largest partial sum, which is about as large as the
2-norm of the terms, or as the sum. So row j of Z y has an error of about

    u (sqrt(rows) |z_j| + |x_j| |T| + |x_j| E)
    E = (|X| |Q| + sqrt(cols) |T|) / sqrt(rows) + sqrt(rows) |c| |Q|

for row j of Z, column j of X, T = X Q + 1 row, and the means c of the columns of X. E is the error of T. The
last summand of E is for rows of X that are alike, because their errors are alike too. The norm of T is about
that of T y.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import isfinite

import numpy as np

from oocgemm.backends.base import Array, numpy_dtype
from oocgemm.backends.checksums import VECTORS, SignVectors
from oocgemm.errors import BudgetError, ExecutionError
from oocgemm.integrity.passes import (
    MAX_CUT_WIDTH,
    PIECE,
    Oriented,
    Passes,
    Rows,
    Sums,
    bias_of,
    product,
    row_norms,
)
from oocgemm.integrity.rounding import SumTolerance, wide_dtype
from oocgemm.planning import GemmProblem
from oocgemm.planning.tiling import Range, ceil_div
from oocgemm.planning.units import format_size
from oocgemm.stores.arrays import scratch_array
from oocgemm.values import dataclass

# Minimum columns of C per group, if C has that many. Narrower groups would reveal smaller errors, but take
# longer: op(A) is multiplied once per group.
GROUP = 1024
# Limits the number of groups of columns. The check multiplies op(A) by random vectors once per group, which
# takes about as long as reading op(A). All these multiplications together may take this share of the time to
# read A, B and C.
MAX_SHARE = 1 / 2
# Minimum number of rows of C in a block, and its minimum extent along k, unless the matrices are smaller. If
# a chunk is larger, its extent is the minimum.
MIN_BLOCK = 256
# Minimum number of elements that a thread reads at a time. A group of columns has at least this many elements
# in C and in op(B), if these matrices are large enough.
MIN_PIECE = 1 << 15


@dataclass(frozen=True)
class CheckedProduct:
    """The matrices of the product to verify: op(A), op(B), C, and the old C (None if beta is 0)."""

    left: Oriented
    right: Oriented
    result: Oriented
    before: Oriented | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.result.shape, self.left.shape[1]

    def transposed(self) -> "CheckedProduct":
        """Return the transposed product, C^T = op(B)^T op(A)^T, whose rows are the columns of C."""
        before = self.before.transposed() if self.before else None
        return CheckedProduct(
            self.right.transposed(), self.left.transposed(), self.result.transposed(), before
        )

    def all(self) -> list[Oriented]:
        return [x for x in (self.left, self.right, self.result, self.before) if x is not None]


@dataclass(frozen=True)
class Blocks:
    """How a check divides its work to fit into its memory.

    `group` columns of C share random vectors. `rows` of C and `depth` indices along k are processed at a
    time, and `piece` elements are read at a time by each of the `threads`.
    """

    group: int
    rows: int
    depth: int
    threads: int
    piece: int


def cut(
    problem: GemmProblem, x: CheckedProduct, memory: int, threads: int, groups: int | None = None
) -> Blocks:
    """Return blocks with which a check takes at most `memory` bytes.

    `threads` and `groups` are maximum numbers of threads and of groups of columns.
    """
    m, n, k = x.shape
    k = k if problem.depth else 0
    wide = wide_dtype(numpy_dtype(problem.acc_dtype)).itemsize
    affordable = int(MAX_SHARE * (m * k + k * n + m * n) / max(1, m * k))
    # Threads multiply op(B) and C by random vectors in parts, and a part lies in one group. If m or k is
    # small, groups get more columns, because small parts are multiplied slowly.
    worthwhile = ceil_div(n, max(GROUP, MIN_PIECE // max(1, min(m, k))))
    groups = max(1, min(worthwhile, affordable, groups or affordable))
    # Bytes for flags: one per column of C (excluded or not), and one per row of C and group (wrong or not).
    # Only one group is counted here.
    fixed = n + m
    # Bytes per group and row of C: expected sums, two temporary arrays of the same size, norms and flags.
    # Bytes per group and index along k: sums, norms and the squares of norms.
    per_row, per_depth = 3 * VECTORS * wide + 128, VECTORS * wide + 24
    tall = max(MIN_BLOCK, x.left.chunk[0], x.result.chunk[0])
    deep = max(MIN_BLOCK, x.left.chunk[1], x.right.chunk[0])

    def scratch(threads: int, piece: int) -> int:
        pieces = max(y.piece_bytes(piece) for y in x.all()) + (x.before.piece_bytes(piece) if x.before else 0)
        # per thread: elements as read; converted elements, squares and products, 8 arrays; random signs
        return threads * (pieces + 8 * piece * wide + VECTORS * MAX_CUT_WIDTH * wide)

    def blocks(rows: int, depth: int) -> Blocks:  # of whole chunks, if there is room for one
        rows = rows if rows >= m else rows // tall * tall or rows
        depth = k if depth >= k else depth // deep * deep or depth
        return Blocks(max(1, ceil_div(n, groups)), max(1, rows), max(1, depth), threads, piece)

    piece = PIECE
    while piece > MIN_PIECE and scratch(threads, piece) > memory // 2:
        piece //= 2
    while threads > 1 and scratch(threads, piece) + fixed > memory // 2:
        threads -= 1
    taken = scratch(threads, piece) + fixed
    minimum = taken + per_row * min(m, tall) + per_depth * min(k, deep)
    if memory < minimum:
        raise BudgetError(
            f"verifying takes at least {format_size(minimum)}, --host-memory is {format_size(memory)}: "
            f"pass --host-memory {ceil_div(minimum, 1 << 20)}MiB",
            least=minimum,
        )
    free = memory - taken
    while True:
        rows_bytes, depth_bytes = per_row * groups + groups, per_depth * groups
        if m * rows_bytes + min(k, deep) * depth_bytes <= free:
            return blocks(m, (free - m * rows_bytes) // depth_bytes)
        if k * depth_bytes + min(m, tall) * rows_bytes <= free:
            return blocks((free - k * depth_bytes) // rows_bytes, k)
        if groups == 1:
            break
        groups //= 2
    # Neither all rows of C nor all of k fit. op(B) is then read once per block of rows, so blocks of rows are
    # made as large as possible, and blocks along k as small as allowed.
    return blocks((free - min(k, deep) * depth_bytes) // rows_bytes, min(k, deep))


# States of columns of op(B) that contain an Inf or NaN. _NEW: found by the current attempt to compare C with
# the product. _KNOWN: found by an earlier attempt, and now excluded from the sums.
_KNOWN, _NEW = 1, 2


@dataclass
class CheckResult:
    """The result of one check of C.

    `wrong` flags the rows with errors in each group, in shape (rows, groups). `excess` is the largest ratio
    of an error to its tolerance; it is infinite if an element is wrongly finite or nonfinite. `tolerance` is
    the largest tolerance of any sum.
    """

    wrong: Array
    excess: float
    tolerance: float


class Check:
    """One check of the columns `cols` of C, which finds the wrong rows. `bound` is one of `BOUNDS`.

    To find wrong columns, pass the transposed product, and rows of C as `cols`.
    """

    def __init__(
        self,
        problem: GemmProblem,
        x: CheckedProduct,
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

    def run(self) -> CheckResult:
        """Return the result of the check. Columns of op(B) with an Inf or NaN are excluded from the sums."""
        found = CheckResult(np.zeros((self._m, self._groups), bool), 0.0, 0.0)
        if self._m == 0 or self._cols[0] == self._cols[1]:
            return found
        with np.errstate(all="ignore"):
            while not self._attempt(found):
                found = CheckResult(np.zeros_like(found.wrong), 0.0, 0.0)
                self._excluded[self._excluded == _NEW] = _KNOWN
        return found

    def _attempt(self, found: CheckResult) -> bool:
        """Compare all rows of C, and return True; False if new columns of op(B) must be excluded first."""
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

        A column with an Inf or NaN is marked `_NEW`. `sums` is then incomplete and must not be used.
        """
        excluded = self._excluded
        some = excluded.any()

        def act(rows: Range, cols: Range, x: Array, _: Array | None) -> None:
            at = slice(rows[0] - sums.span[0], rows[1] - sums.span[0])
            group, which = self._group(cols), slice(*cols)
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
        """Add op(A) times `sums.values`, for `sums.span` of k, to `rows.expected`, and add its bounds."""

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

    def _compare(self, rows: Rows, found: CheckResult) -> None:
        """Compare C y - beta C0 y with alpha op(A) op(B) y, for the rows in `rows` and all sign vectors y."""
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

        def change_of(part: Array, before: Array | None, y: Array) -> Array:
            change = product(part, y)
            return change if before is None else change - tolerance.beta * product(before, y)

        def act(at_rows: Range, cols: Range, part: Array, before: Array | None) -> None:
            at = slice(at_rows[0] - rows.span[0], at_rows[1] - rows.span[0])
            group, which = self._group(cols), slice(*cols)
            bad, replaced = None, None
            change = change_of(part, before, self._signs_of(cols))
            affected = some and (rows.nonfinite[at].any() or self._excluded[which].any())
            if affected or not np.isfinite(change).all():
                nonfinite = rows.nonfinite[at, None] | (self._excluded[which] != 0)
                may = [limit[at, group, None] for limit in overflow]
                part, before, bad, replaced = _without_nonfinite(part, before, nonfinite, tolerance, *may)
                replaced = np.logical_or.reduce(replaced & (self._excluded[which] == 0), 1)
                change = change_of(part, before, self._signs_of(cols))
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
        """Return random signs of shape (columns, VECTORS). Each thread caches its last result."""
        if getattr(self._drawn, "cols", None) != cols:
            self._drawn.cols, self._drawn.signs = cols, self._signs.part(*cols)
        signs: Array = self._drawn.signs
        return signs

    def _group(self, cols: Range) -> int:
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

    `nonfinite` flags elements whose row of op(A) or column of op(B) has an Inf or NaN, `overflow` flags
    elements that may be Inf or NaN, and `too_large` elements that may be Inf. Returns the block and the old
    block without elements that cannot be compared, flags of the rows with an element that is wrongly finite
    or wrongly nonfinite, and flags of the elements that were replaced.
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
    """Return the columns of one group in `Sums.values` or `Rows.expected`."""
    return slice(group * VECTORS, (group + 1) * VECTORS)


def hull(which: Array) -> Range:
    """Return the smallest range of indices (start, stop) that contains all set flags."""
    found = np.flatnonzero(which)
    return int(found[0]), int(found[-1]) + 1


# Number of vectors of random signs.
COMBINATIONS = 2
# Ratio of the bound of a rounding error to its estimate.
DEVIATION = 32


def check_chained(
    x: Oriented,
    factor: Array,
    row: Array,
    result: Array,
    *,
    band: int,
    threads: int,
    report: Callable[[], None],
) -> None:
    """Raise `ExecutionError` if `result` is not ``X^T (X Q + 1 row)`` within rounding error.

    `factor` is Q, with further columns of zeros. A thread reads `band` rows of X at a time, and calls
    `report`. If `report` raises an error, the check ends.
    """
    rows, cols = x.shape
    signs = SignVectors(0).part(0, len(row))[:, :COMBINATIONS]
    right, added = factor.astype(np.float64) @ signs, row.astype(np.float64) @ signs
    expected, length = np.zeros((cols, COMBINATIONS)), np.zeros(COMBINATIONS)
    squares, totals = np.zeros(cols), np.zeros(cols)
    lock = threading.Lock()

    def act(top: int) -> None:
        bottom = min(rows, top + band)
        room = scratch_array("band", ((bottom - top) * cols * x.matrix.dtype.itemsize,), np.dtype(np.uint8))
        block = x.read((top, bottom), (0, cols), room)
        report()
        found, size, sums = np.zeros_like(expected), np.zeros((2, cols)), np.zeros(COMBINATIONS)
        height = max(1, PIECE // max(1, cols))
        with np.errstate(all="ignore"):
            for start in range(0, len(block), height):
                part = block[start : start + height].astype(np.float64)
                t = product(part, right) + added
                found += product(part.T, t)
                size += np.einsum("ij,ij->j", part, part), part.sum(axis=0)
                sums += np.einsum("ij,ij->j", t, t)
        with lock:
            np.add(expected, found, out=expected)
            np.add(squares, size[0], out=squares)
            np.add(totals, size[1], out=totals)
            np.add(length, sums, out=length)

    with ThreadPoolExecutor(threads, thread_name_prefix="oocgemm-chained") as pool:
        for _ in pool.map(act, range(0, rows, band)):  # raises what a thread has raised
            pass
    unit = float(np.finfo(result.dtype).eps) / 2
    with np.errstate(all="ignore"):
        of_t, of_q = np.sqrt(length.mean()), np.linalg.norm(factor.astype(np.float64))
        of_z = np.linalg.norm(result.astype(np.float64), axis=1)
        errors = (np.sqrt(squares.sum()) * of_q + np.sqrt(cols) * of_t) / np.sqrt(rows)
        errors += np.linalg.norm(totals) / np.sqrt(rows) * of_q
        bound = np.sqrt(rows) * of_z + np.sqrt(squares) * (of_t + errors)
        bound = DEVIATION * unit * bound + len(row) * float(np.finfo(result.dtype).tiny)
        difference = np.abs(result.astype(np.float64) @ signs - expected).max(axis=1)
        # Larger sums may overflow. The caller reports elements that are not finite.
        fits = np.sqrt(squares) * of_t < float(np.finfo(result.dtype).max) / 16
        decided = np.isfinite(expected).all(axis=1) & fits
        wrong = np.flatnonzero(decided & ~(difference <= bound))
    if wrong.size:
        j = wrong[0]
        raise ExecutionError(
            f"row {j} of a product with X (one of {wrong.size} such rows of {cols}) differs from the same "
            f"product on the host by {difference[j]:.3g}, and rounding allows {bound[j]:.3g}: the device, "
            "the memory or the BLAS computes or copies wrongly; test this machine, then run again"
        )
