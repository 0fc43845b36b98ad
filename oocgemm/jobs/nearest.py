"""Search the nearest rows by distances: candidates by products, then exact distances of the candidates.

A run ranks rows by products of limited precision. It keeps some more candidates than are wanted. Let d be the
exact distance of the last one wanted, and e a bound of the error of a distance that the run has computed. All
rows that are no candidates have computed distances of at least that of the last candidate. If that is at
least d + e, none of them is nearer. Otherwise the search is repeated for this row, by products in float64.

Squared distances have errors of at most ``e = 2 (g + 4 u) (|x - c| + |y - c|)^2``, for the mean c of
rows, the unit roundoff u, and the error g of a sum of k products (`rounding.sum_error`). The distance of
cosines is half the squared distance of rows of norm 1.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import numpy as np

from oocgemm.backends.base import limits_of
from oocgemm.integrity.passes import Oriented
from oocgemm.integrity.rounding import OPERANDS, sum_error
from oocgemm.jobs import run as running
from oocgemm.jobs.operands import open_operands, squared_norms
from oocgemm.jobs.pairs import ScaledRows, cores, parts_of, sort_candidates, squared_distances
from oocgemm.jobs.request import Request, Selection
from oocgemm.jobs.run import Result
from oocgemm.jobs.stats import inverse_norms
from oocgemm.jobs.steps import Cosines
from oocgemm.jobs.transforming import memory_of, readable
from oocgemm.planning import DTYPES, GemmProblem
from oocgemm.stores import Array, Collecting, Matrix
from oocgemm.stores.transform import Transform
from oocgemm.stores.transformed import chain_of, with_numbers

# The number of candidates beyond those that are wanted.
SPARE = 8


class FoundRows(NamedTuple):
    """The fields of `oocgemm.Nearest`."""

    indices: Array
    distances: Array
    indptr: Array | None
    run: Result


class WideRows(NamedTuple):
    """The rows of op(A) and the columns of op(B), with elements that are not rounded after a transform.

    `left_norms` and `right_norms` are those of the rows less the mean of rows. For cosines, rows are
    scaled to the norm 1, or are 0.
    """

    left: ScaledRows
    right: ScaledRows
    left_norms: Array
    right_norms: Array


class Search:
    """The search that a request describes: for `topk` rows, or with `radius` for all rows that are so near.

    The scores of the request are squared distances times -1, or cosines.
    """

    def __init__(self, request: Request, into: Selection, metric: str, radius: float | None) -> None:
        self.request = replace(request, into=into)
        self._into, self._metric, self._radius = into, metric, radius

    def run(self) -> FoundRows:
        """Find the nearest rows."""
        return self._within(self._radius) if self._radius is not None else self._topk()

    def candidates(self, error: float = 0.0) -> Request:
        """Return the request of the candidates. `error` is the largest one of distances, for a radius."""
        if self._radius is None:
            count = min(self._opened[2].n - self._into.excludes_self, self._into.topk + SPARE)
            return replace(self.request, into=replace(self._into, topk=count))
        farthest = (self._radius**2 if self._metric == "euclidean" else self._radius) + error
        least = 1 - farthest if self._metric == "cosine" else -farthest * (1 + 2.0**-22)
        return replace(self.request, into=replace(self._into, topk=0, threshold=least))

    @cached_property
    def _opened(self) -> tuple[Matrix, Matrix, GemmProblem]:
        return open_operands(replace(self.request, epilogue=(), verify=False), "host")

    @cached_property
    def _rows(self) -> WideRows:
        (a, b, problem), memory = self._opened, memory_of(self.request)
        same = b is a
        a = readable(a, memory)
        b = a if same else readable(b, memory)
        scales: tuple[Array | None, Array | None] = None, None
        if self._metric == "cosine":
            remedy = "pass another metric"
            scales = (
                inverse_norms(_wide(a), problem.trans_a, memory, remedy),
                inverse_norms(_wide(b), problem.trans_b, memory, remedy, right="row"),
            )
            norms = [(scale > 0).astype(float) for scale in scales]
        elif problem.exact:  # there are no errors, which would grow with norms
            norms = [np.zeros(problem.m), np.zeros(problem.n)]
        else:
            norms = [np.sqrt(each) for each in squared_norms(problem, a, b, memory)]
        left = ScaledRows(Oriented(_wide(a), problem.trans_a.swaps), scales[0])
        right = ScaledRows(Oriented(_wide(b), not problem.trans_b.swaps), scales[1])
        return WideRows(left, right, norms[0], norms[1])

    def _error(self, problem: GemmProblem) -> Array:
        """Return by how much computed distances of each row may differ from exact ones.

        `problem` is the product that is computed, or the product of the operands, whose errors are larger.
        """
        _, _, first, second = self._rows
        sizes = np.square(first + second.max(initial=0))
        if problem.exact:
            return np.asarray(2.0**-48 * sizes)  # of cosines, whose scores are in float64
        limits = limits_of(problem.acc_dtype)
        narrow = limits_of(problem.a_dtype if self._metric == "cosine" else problem.acc_dtype)
        unit = sum_error(problem.k, float(limits.eps) / 2) + 2 * float(narrow.eps)
        tiny = 4 * problem.k * float(limits.tiny)
        return np.asarray(2 * (unit + 2 * OPERANDS[problem.compute]) * sizes + tiny)

    def _exact(self, rows: Array, cols: Array) -> Array:
        """Return the exact distances of row rows[i] and row cols[i, j]; squared for the metric euclidean."""
        left, right, first, second = self._rows
        found = squared_distances(left, right, rows, cols, memory_of(self.request) // 4)
        if self._metric == "cosine":
            found /= 2
            if not (first.all() and second.all()):
                found[(first[rows] == 0)[:, None] | (second[cols] == 0)] = 1
        return found

    def _computed(self, scores: Array) -> Array:
        """Return the distances of scores, in float64; squared for the metric euclidean."""
        wide = scores.astype(np.float64)
        return 1 - wide if self._metric == "cosine" else -wide

    def _shown(self, exact: Array, scores: Array) -> Array:
        """Return the distances of the metric, in the dtype of scores."""
        return (np.sqrt(exact) if self._metric == "euclidean" else exact).astype(scores.dtype)

    def _topk(self) -> FoundRows:
        problem, into = self._opened[2], self._into
        run = running.run_request(self.candidates())
        kept, rows = run.out, np.arange(problem.m)
        scores, wanted = kept["score"], np.s_[:, : into.topk]
        indices = np.empty((problem.m, into.topk), np.int64)
        distances, unsure = np.empty(indices.shape, scores.dtype), np.zeros(problem.m, bool)
        hidden = kept.shape[1] < problem.n - into.excludes_self
        narrow = hidden and run.plan.problem.acc_dtype == "float32"
        error = self._error(run.plan.problem) if narrow else None
        parts = parts_of(self._rows.left, self._rows.right, *kept.shape)

        def refine(here: slice) -> None:
            exact, found = self._ranked(rows[here], kept["index"][here].astype(np.int64))
            indices[here], distances[here] = found[wanted], self._shown(exact[wanted], scores)
            if error is not None:
                unsure[here] = exact[:, into.topk - 1] > self._computed(scores[here, -1]) - error[here]

        with ThreadPoolExecutor(cores(), thread_name_prefix="oocgemm-near") as pool:
            list(pool.map(refine, parts))
        if (again := np.flatnonzero(unsure)).size:
            exact, indices[again] = self._in_float64(again)
            distances[again] = self._shown(exact, scores)
        return FoundRows(indices, distances, None, replace(run, c=None))

    def _in_float64(self, rows: Array) -> tuple[Array, Array]:
        """Return the exact distances and the numbers of the nearest rows to some rows."""
        request, into, most = self.request, self._into, self._opened[2].n
        # Means and scales are those of all rows, not those of `rows`.
        changes = [with_numbers(readable(x, memory_of(request))) or Transform() for x in self._opened[:2]]
        left, right = (replace(change, cast="float64") for change in changes)
        count = min(most, into.topk + SPARE)  # more than the row itself, if it does not count
        request = replace(
            request,
            a=replace(request.a, transform=left, missing=None, kept=rows),
            b=replace(request.b, transform=right, missing=None),
            into=replace(into, topk=count, same=False, excludes_self=False, cosine=False),
            epilogue=(Cosines(),) if into.cosine else request.epilogue,
            compute="native",
            timeline=None,
            tile=None,
        )
        indices = running.run_request(request).out["index"].astype(np.int64)
        exact, indices = self._ranked(rows, indices, excludes=into.excludes_self)
        return exact[:, : into.topk], indices[:, : into.topk]

    def _ranked(self, rows: Array, indices: Array, *, excludes: bool = False) -> tuple[Array, Array]:
        """Return exact distances to candidates, the nearest first, and their numbers.

        With `excludes`, a row is the last one of its own candidates.
        """
        exact = self._exact(rows, indices)
        if excludes:
            exact[indices == rows[:, None]] = np.inf
        sort_candidates(exact, indices)
        return exact, indices

    def _within(self, radius: float) -> FoundRows:
        problem = self._opened[2]
        error = 2 * float(self._error(problem).max(initial=0))
        if self._metric == "cosine":
            error += 4 * sqrt(problem.k + 1) * float(limits_of(DTYPES[problem.a_dtype].accumulator).eps)
        run = running.run_request(self.candidates(error))
        assert isinstance(run.c, Collecting)
        starts, cols, scores = run.c.csr()
        rows = np.repeat(np.arange(problem.m), np.diff(starts))
        exact = self._exact(rows, cols[:, None]).ravel()
        shown = np.sqrt(exact) if self._metric == "euclidean" else exact
        at = np.flatnonzero(shown <= radius)
        starts = np.concatenate(([0], np.cumsum(np.bincount(rows[at], minlength=problem.m))))
        return _sorted(run, starts, rows[at], cols[at], shown[at], scores.dtype)


class CountedSearch:
    """The search that a request describes whose scores are exact distances, times -1."""

    def __init__(self, request: Request, into: Selection, radius: float | None) -> None:
        chosen = into if radius is None else replace(into, threshold=-radius)
        self.request, self._radius = replace(request, into=chosen), radius

    def candidates(self) -> Request:
        """Return the request of the results themselves."""
        return self.request

    def run(self) -> FoundRows:
        """Find the nearest rows."""
        run = running.run_request(self.request)
        if self._radius is None:
            indices, distances = run.out["index"].astype(np.int64), 0 - run.out["score"]
            return FoundRows(indices, distances, None, replace(run, c=None))
        assert isinstance(run.c, Collecting)
        starts, cols, scores = run.c.csr()
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return _sorted(run, starts, rows, cols, 0 - scores, scores.dtype)


def _sorted(
    run: Result, starts: Array, rows: Array, cols: Array, distances: Array, dtype: np.dtype[np.floating]
) -> FoundRows:
    """Return found rows, the nearest first. Those of row i are numbers starts[i] to starts[i + 1] - 1."""
    order = np.lexsort((cols, distances, rows))
    found = distances[order].astype(dtype)
    return FoundRows(cols[order].astype(np.int64), found, starts, replace(run, c=None))


def _wide(matrix: Matrix) -> Matrix:
    """Return a matrix with elements that are not rounded after its transform."""
    chain = chain_of(matrix)
    return matrix if chain is None else chain.wide()
