"""Check samples of the results that an epilogue, a selection or a reduction computes from a product.

Checksums show that the product itself was right (`oocgemm.integrity.tile_checks`). This module checks the
results that were then computed from it. Sampled elements of the product are computed again in float64 from A
and B, which are read again. NumPy computes bounds of the results (`oocgemm.integrity.rounding`), and the
results must be within these bounds. There are three kinds of samples:

- *Rows*: whole rows of C. In a selection, they show whether elements of these rows are missing. In a
  reduction, they give the results of these rows.
- *Columns*: whole columns of a C that is stored. So a few elements of each row are checked.
- *Pairs*: selected elements: one element of each row or, if few were selected, all elements.

A and B are read once each, or twice if C is not stored.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, Finishing
from oocgemm.errors import ExecutionError
from oocgemm.integrity.passes import Oriented, Passes, product, row_norms
from oocgemm.integrity.rounding import Interval, RoundedElements, contains, sum_error
from oocgemm.planning import GemmProblem
from oocgemm.planning.device_memory import NONE
from oocgemm.planning.sinks import AtLeast, Largest, Reduced, Selected, Sink
from oocgemm.planning.tiling import Range
from oocgemm.values import dataclass

# Number of sampled rows, which is also that of sampled columns, and number of runs of neighbors that they
# form. A store reads whole chunks, so that reading a run takes as long as reading one row.
LINES, RUNS = 8, 4
# All selected elements are checked if that takes at most FEW products, otherwise one element of each row.
FEW = 1 << 24
# Maximum number of elements of the columns of op(B) that are kept in memory for this.
WINDOW = 1 << 24
# Maximum number of times that an element of a row is drawn until its column is in memory.
DRAWS = 8
# Maximum number of selected elements whose columns of op(B) are gathered at a time.
GATHERED = 1 << 12
# Number of elements of op(B) that a thread gathers at a time.
GATHERED_ELEMENTS = 1 << 16
# The memory that a selected element takes while it is checked: indices, scores, sums and bounds, in float64.
PAIR_BYTES = 256


@dataclass(frozen=True)
class SampledResult:
    """The result that a run computed from a product.

    `stored` is C, if it is stored. `kept` has the result for each row: selected elements (`SELECTED`),
    results of a reduction, or rows of the product of C with the `factor` V. `sparse` has row starts, columns
    and scores of the elements at or above a threshold. `sink` has this threshold, in the dtype of scores.
    With `once`, `sparse` has the mirror images of the elements left of the diagonal.
    """

    sink: Sink
    stored: Oriented | None = None
    kept: Array | None = None
    sparse: tuple[Array, Array, Array] | None = None
    factor: Array | None = None
    once: bool = False


@dataclass
class Samples:
    """Checks samples of a result. Call `check`, which raises `ExecutionError` for a wrong one.

    Attributes:
        left, right: op(A) and op(B), with the elements that were multiplied. If the product is used for
            distances, the elements before they were rounded.
        d: the further matrix that the epilogue reads; None if it reads none.
        finishing: the numbers that the epilogue and the selection use.
        memory: upper bound in bytes for samples.
        elements: the number of elements that were computed again.
    """

    problem: GemmProblem
    left: Oriented
    right: Oriented
    d: Oriented | None
    finishing: Finishing
    passes: Passes
    memory: int
    seed: int = 0
    elements: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, made: SampledResult) -> None:
        """Compare samples of a result with the product of A and B. Raise `ExecutionError` if one differs."""
        self._bounds = RoundedElements(self.problem, self.finishing)
        m, n = self.problem.m, self.problem.n
        of_line = 8 * (self.problem.depth + 8 * max(m, n))
        lines = max(1, min(LINES, self.memory // (2 * of_line)))
        rng = np.random.default_rng(self.seed)
        rows = chosen(rng, m, lines)
        if self.problem.triangle and made.stored is not None:
            # The first and the last line of a triangle, as a row and as a column, meet all other lines.
            rows = sorted({0, m - 1, *rows})
        sums, norms = self._products(self.left, self.right, rows)
        if made.stored is None:
            self._check_rows(made, rows, sums, norms)
        else:
            self._check_lines(made.stored, rows, sums, norms, of_rows=True)
            # Row i of a symmetric product is also its column i.
            cols = rows
            if not self.problem.b.shares:
                cols = chosen(rng, n, lines)
                sums, norms = self._products(self.right.transposed(), self.left.transposed(), cols)
            self._check_lines(made.stored.transposed(), cols, sums, norms, of_rows=False)
        if isinstance(made.sink, Selected):
            self._check_pairs(made, rng)

    def _products(self, left: Oriented, right: Oriented, lines: Sequence[int]) -> tuple[Array, Array]:
        """Return the products, or squared distances, of some rows of `left` and all columns of `right`.

        Also return the products of the norms of these rows and columns. Both arrays have a row per line.
        """
        depth, across = self.problem.depth, right.shape[1]
        picked = np.zeros((len(lines), depth))
        sums, squares = np.zeros((across, len(lines))), np.zeros(across)
        if depth:
            for at, line in enumerate(read_lines(left, lines)):
                picked[at] = line

            def act(rows: Range, cols: Range, x: Array, _: Array | None) -> None:
                part = picked[:, slice(*rows)]
                found = _distances(x, part) if self.problem.measures_distances else product(x.T, part.T)
                size = np.einsum("ij,ij->j", x, x)
                with self._lock:
                    sums[slice(*cols)] += found
                    squares[slice(*cols)] += size

            self.passes.each(right, (0, depth), (0, across), act, columns=len(lines))
        self.elements += sums.size
        with np.errstate(all="ignore"):
            return sums.T, np.outer(row_norms(picked) if depth else np.zeros(len(lines)), np.sqrt(squares))

    def _check_lines(
        self, stored: Oriented, lines: Sequence[int], sums: Array, norms: Array, *, of_rows: bool
    ) -> None:
        """Check some rows of `stored`, which are rows of C if `of_rows`, and otherwise columns of C."""
        every, triangle = np.arange(stored.shape[1]), self.problem.triangle
        d = None if self.d is None else self.d if of_rows else self.d.transposed()
        further = [None] * len(lines) if d is None else read_lines(d, lines)
        for at, (line, values, more) in enumerate(
            zip(lines, read_lines(stored, lines), further, strict=True)
        ):
            others = every
            if triangle:
                others = every[: line + 1] if of_rows == (triangle == "lower") else every[line:]
            where: tuple[Any, Any] = (line, others) if of_rows else (others, line)
            of_d = None if more is None else more[others]
            found = self._bounds.bounds(sums[at, others], norms[at, others], *where, of_d)
            self._compare(values[others], found, *where)

    def _check_rows(self, made: SampledResult, rows: Sequence[int], sums: Array, norms: Array) -> None:
        """Check the elements that were selected from some rows of C, or the reductions of these rows."""
        cols = np.arange(self.problem.n)
        for at, i in enumerate(rows):
            found = self._bounds.bounds(sums[at], norms[at], *((cols, i) if made.once else (i, cols)))
            if made.sparse is not None:
                starts, columns, scores = made.sparse
                part = slice(starts[i], starts[i + 1])
                self._check_selected(made, i, columns[part], scores[part], found)
                continue
            assert made.kept is not None
            kept = made.kept[i]
            if isinstance(made.sink, Largest):
                taken = kept[kept.view(np.uint8).reshape(len(kept), -1).min(1) != NONE]
                self._check_selected(made, i, taken["index"].astype(np.int64), taken["score"], found)
            else:
                self._check_reduced(made, i, kept, found)

    def _check_pairs(self, made: SampledResult, rng: np.random.Generator) -> None:
        """Check the scores of selected elements whose columns are in a range that fits into `WINDOW`."""
        n, depth, item = self.problem.n, self.problem.depth, self.right.matrix.dtype.itemsize
        width = max(1, min(n, min(WINDOW, self.memory // (2 * item)) // max(1, depth)))
        left = int(rng.integers(n - width + 1))
        rows, cols, scores = _pairs(
            made, rng, (left, left + width), min(FEW // max(1, depth), self.memory // PAIR_BYTES)
        )
        if not rows.size:
            return
        sums, squares = np.zeros(rows.size), [np.zeros(self.problem.m), np.zeros(width)]
        if depth:
            window = np.ascontiguousarray(read(self.right, (0, depth), (left, left + width), wide=False).T)
            step = max(1, min(GATHERED, self.memory // (32 * depth)))
            norms = [row_norms(window[at : at + step].astype(float)) for at in range(0, width, step)]
            squares[1] = np.concatenate(norms) ** 2

            def act(span: Range, k: Range, x: Array, _: Array | None) -> None:
                size = np.einsum("ij,ij->i", x, x)
                with self._lock:
                    squares[0][slice(*span)] += size
                first, last = np.searchsorted(rows, span)
                step = max(1, min(GATHERED, GATHERED_ELEMENTS // max(1, k[1] - k[0])))
                for at in range(first, last, step):
                    part = slice(at, min(last, at + step))
                    right = window[cols[part] - left, slice(*k)].astype(np.float64)
                    of_row = x[rows[part] - span[0]]
                    if self.problem.measures_distances:
                        of_row = right = of_row - right
                    found = np.einsum("pk,pk->p", of_row, right)
                    with self._lock:
                        sums[part] += found

            self.passes.each(self.left, (0, self.problem.m), (0, depth), act)
        self.elements += rows.size
        norm = np.sqrt(squares[0][rows]) * np.sqrt(squares[1][cols - left])
        where = (cols, rows) if made.once else (rows, cols)
        self._compare(scores, self._bounds.bounds(sums, norm, *where), rows, cols)

    def _check_selected(
        self, made: SampledResult, i: int, cols: Array, scores: Array, found: Interval
    ) -> None:
        """Check the selected elements of row i, and that none is missing. `found` bounds the whole row."""
        low, high = found
        if ((cols < 0) | (cols >= len(low))).any():
            raise self._error(f"the elements that were selected of row {i} of C have wrong indices")
        self._compare(scores, (low[cols], high[cols]), i, cols)
        others = np.ones(len(low), bool)
        others[cols] = False
        sink = made.sink
        assert isinstance(sink, Largest | AtLeast)
        without_own = sink.excludes_self and i < len(low)
        if without_own:
            others[i] = False
        if made.once:
            others[:i] = False
        if isinstance(sink, Largest):
            least = scores.min(initial=np.inf)
            wrong = len(np.unique(cols)) != min(sink.topk, len(low) - without_own)
            missing = others & (low > least)
        else:
            least, large = sink.threshold, np.maximum(high, -low) if sink.absolute else high
            wrong = len(np.unique(cols)) != len(cols) or bool((large[cols] < least).any())
            missing = others & ((low >= least) | (sink.absolute & (high <= -least)))
        if wrong or missing.any():
            what = f"element {int(missing.argmax())} is missing" if missing.any() else "their number is wrong"
            raise self._error(f"the elements that were selected of row {i} of C are wrong: {what}")

    def _check_reduced(self, made: SampledResult, i: int, value: Array, found: Interval) -> None:
        """Check the reduction of row i of C, or its product with V. `found` bounds the row's elements."""
        low, high = found
        with np.errstate(all="ignore"):
            if made.factor is not None:
                v, unit = made.factor.astype(np.float64), float(np.finfo(made.factor.dtype).eps) / 2
                middle, size = (low + high) / 2, np.maximum(abs(low), abs(high))
                limits, terms = np.finfo(made.factor.dtype), size @ abs(v)
                error = (high - low) / 2 @ abs(v) + 4 * sum_error(len(low) + 2, unit) * terms
                error = error + (len(low) + 2) * float(limits.tiny)  # products may underflow
                error = np.where(terms < float(limits.max) / 16, error, np.nan)  # or overflow
                bounds = middle @ v - error, middle @ v + error
            elif isinstance(made.sink, Reduced) and made.sink.reduction == "max":
                bounds = low.max(keepdims=True), high.max(keepdims=True)
            else:
                if isinstance(made.sink, Reduced) and made.sink.reduction == "sumsq":
                    least = np.where((low < 0) & (high > 0), 0, np.minimum(low * low, high * high))
                    low, high = least, np.maximum(low * low, high * high)
                error = sum_error(len(low) + 2, 2.0**-53) * np.maximum(abs(low), abs(high)).sum()
                bounds = np.atleast_1d(low.sum() - error), np.atleast_1d(high.sum() + error)
        self._compare(value, bounds, i, np.arange(value.size), "result")

    def _compare(
        self, values: Array, found: Interval, rows: Array | int, cols: Array | int, what: str = "C"
    ) -> None:
        """Raise `ExecutionError` if a value is outside its interval. `rows` and `cols` are the positions."""
        right = contains(found, values.astype(np.float64))
        if not right.all():
            at = int(np.argmin(right))
            i, j = (np.broadcast_to(x, right.shape)[at] for x in (rows, cols))
            raise self._error(
                f"{what}[{i}, {j}] is {float(values[at]):.8g}, and A and B give a number from "
                f"{found[0][at]:.8g} to {found[1][at]:.8g} (one of {int((~right).sum())} such elements)"
            )

    @staticmethod
    def _error(what: str) -> ExecutionError:
        return ExecutionError(
            f"{what}. Either what was made of the product is wrong, or A or B has changed since the run read "
            "it. If they have not, test this machine. Then run again, and overwrite C if it is stored"
        )


def _distances(x: Array, lines: Array) -> Array:
    """Return the squared distance of each column of x to each of some lines."""
    found = np.empty((x.shape[1], len(lines)))
    for at, line in enumerate(lines):
        apart = x - line[:, None]
        found[:, at] = np.einsum("ij,ij->j", apart, apart)
    return found


def chosen(rng: np.random.Generator, extent: int, count: int) -> list[int]:
    """Return at most `count` of `extent` indices, in `RUNS` runs that are spread over all of them."""
    if extent <= count:
        return list(range(extent))
    runs = min(RUNS, count)
    length = count // runs
    starts = (
        int(
            rng.integers(
                extent * run // runs, max(extent * run // runs, extent * (run + 1) // runs - length) + 1
            )
        )
        for run in range(runs)
    )
    return sorted({index for start in starts for index in range(start, start + length)})


def read_lines(x: Oriented, lines: Sequence[int]) -> Iterator[Array]:
    """Yield some rows of a real matrix in float64. Neighbors are read together."""
    starts = [at for at, line in enumerate(lines) if at == 0 or line != lines[at - 1] + 1]
    for first, last in pairwise([*starts, len(lines)]):
        yield from read(x, (lines[first], lines[last - 1] + 1), (0, x.shape[1]))


def read(x: Oriented, rows: Range, cols: Range, *, wide: bool = True) -> Array:
    """Return a block of a real matrix, in float64 if it is to be `wide`."""
    count = (rows[1] - rows[0]) * (cols[1] - cols[0])
    block = x.read(rows, cols, np.empty(count * x.matrix.dtype.itemsize, np.uint8))
    return block.astype(np.float64) if wide else block


def _pairs(
    made: SampledResult, rng: np.random.Generator, window: Range, few: int
) -> tuple[Array, Array, Array]:
    """Choose selected elements in a range of columns. Return their rows, in order, columns and scores.

    If more than `few` elements were selected, one element of each row is chosen. It is drawn again, at most
    `DRAWS` times in all, until it is in the range.
    """
    if made.sparse is not None:
        starts, cols, scores = made.sparse
    else:
        assert made.kept is not None
        flat = made.kept.ravel()
        starts = np.arange(len(made.kept) + 1) * made.kept.shape[1]
        cols, scores = flat["index"], flat["score"]
    counts = np.diff(starts)
    rows = np.arange(len(counts))
    if starts[-1] <= few:
        at = np.arange(starts[-1])
        rows = np.repeat(rows, counts)
    else:
        rows = rows[counts > 0]
        at, outside = starts[rows], np.arange(len(rows))
        for _ in range(DRAWS):
            drawn = rows[outside]
            at[outside] = starts[drawn] + (rng.random(drawn.size) * counts[drawn]).astype(np.int64)
            outside = np.flatnonzero(~_within(cols[at], window))
    inside = _within(cols[at], window)
    at = at[inside]
    return rows[inside], cols[at].astype(np.int64), scores[at]


def _within(indices: Array, window: Range) -> Array:
    return np.asarray((indices >= window[0]) & (indices < window[1]))
