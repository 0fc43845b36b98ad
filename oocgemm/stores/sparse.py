"""A sparse result: the elements of C that are at or above a threshold, in host memory."""

from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import Layout
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array


@dataclass(frozen=True, slots=True)
class Rule:
    """Which elements of C are kept: those whose score is at least `threshold`.

    Attributes:
        threshold: the least score, or the least magnitude with `absolute`.
        absolute: whether magnitudes are compared.
        excludes_self: whether elements on C's diagonal are left out.
        scales: what rows and columns of C are multiplied by to get scores; None for the elements themselves.
    """

    threshold: float
    absolute: bool
    excludes_self: bool
    scales: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Elements of some rows and columns of C, row by row. `counts` has the number of elements per row."""

    top: int
    left: int
    counts: Array
    columns: Array
    scores: Array


class SparseMatrix:
    """A C of which some elements are kept. Implements `Matrix`, except that it cannot be read."""

    def __init__(
        self, name: str, shape: tuple[int, int], score: np.dtype[Any], rule: Rule, limit: int
    ) -> None:
        """Keep elements as scores of dtype `score`, in at most `limit` bytes of memory."""
        self.name, self.shape, self.dtype = name, shape, score
        self.layout = Layout(in_memory=True, itemsize=score.itemsize)
        self._rule, self._limit = rule, limit
        self._scales = None if rule.scales is None else rule.scales.astype(score)
        self._parts: list[_Part] = []
        self._bytes, self._adding = 0, Lock()

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        raise AssertionError("elements that are not kept are unknown")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Keep the elements of a block that the rule selects."""
        scores = data
        if self._scales is not None:
            scores = data * (self._scales[slice(*rows), None] * self._scales[slice(*cols)])
        bound = self.dtype.type(self._rule.threshold)
        kept = (np.abs(scores) if self._rule.absolute else scores) >= bound
        if self._rule.excludes_self:
            own = np.arange(max(rows[0], cols[0]), max(rows[0], cols[0], min(rows[1], cols[1])))
            kept[own - rows[0], own - cols[0]] = False
        at, columns = np.nonzero(kept)
        counts = np.bincount(at, minlength=rows[1] - rows[0])
        self._add(_Part(rows[0], cols[0], counts, columns + cols[0], scores[at, columns]))

    def put(self, rows: Range, cols: Range, segments: Array, elements: Array) -> None:
        """Keep the elements of a block that a device has found (`oocgemm.backends.base.SEGMENTS`)."""
        order = np.lexsort((segments["first"], segments["row"]))
        sizes = segments["count"][order].astype(np.int64)
        ends = np.cumsum(sizes)
        # The elements of the segments in this order, one segment after the other.
        shift = segments["first"][order].astype(np.int64) - (ends - sizes)
        ordered = elements[np.repeat(shift, sizes) + np.arange(ends[-1] if len(ends) else 0)]
        counts = np.bincount(segments["row"][order], sizes, rows[1] - rows[0]).astype(np.int64)
        columns = ordered["index"].astype(np.int64)
        self._add(_Part(rows[0], cols[0], counts, columns, np.ascontiguousarray(ordered["score"])))

    def _add(self, part: _Part) -> None:
        with self._adding:
            if part.columns.size:
                self._parts.append(part)
            self._bytes += part.columns.nbytes + part.scores.nbytes
            if self._bytes > self._limit:
                raise ExecutionError(
                    f"the elements found so far take {format_size(self._bytes)}, more than the "
                    f"{format_size(self._limit)} of memory for them: pass a larger threshold"
                )

    def csr(self) -> tuple[Array, Array, Array]:
        """Return all elements row by row, in ascending order of columns: row starts, columns, and scores."""
        totals = np.zeros(self.shape[0] + 1, np.int64)
        for part in self._parts:
            totals[part.top + 1 : part.top + 1 + len(part.counts)] += part.counts
        starts = np.cumsum(totals)
        columns, scores = np.empty(starts[-1], np.int64), np.empty(starts[-1], self.dtype)
        free = starts[:-1].copy()
        self._parts.sort(key=lambda part: part.left)
        for part in self._parts:
            rows = slice(part.top, part.top + len(part.counts))
            begins = np.cumsum(part.counts) - part.counts
            to = np.repeat(free[rows] - begins, part.counts) + np.arange(len(part.columns))
            columns[to], scores[to] = part.columns, part.scores
            free[rows] += part.counts
        self._parts.clear()
        return starts, columns, scores

    def sync(self) -> None:
        pass

    def set_finished(self, finished: bool) -> None:
        pass

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return {"store": "memory", "path": None, "shape": list(self.shape), "dtype": self.dtype.name}

    def identities(self) -> set[object]:
        return set()
