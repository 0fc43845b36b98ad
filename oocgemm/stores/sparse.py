"""A sparse result: the elements of C that are at or above a threshold, in host memory.

If C is symmetric, only elements of its lower triangle are added, and each stands for its mirror image too.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from oocgemm.errors import ExecutionError
from oocgemm.planning import InMemory, Layout
from oocgemm.planning.tiling import Range
from oocgemm.planning.units import format_size
from oocgemm.stores.base import Array, described


@dataclass(frozen=True, slots=True)
class Rule:
    """Which elements of C are kept: those whose score is at least `threshold`.

    Attributes:
        threshold: the least score, or the least magnitude with `absolute`.
        absolute: whether magnitudes are compared.
        excludes_self: whether elements on C's diagonal are left out.
        scales: what rows and columns of C are multiplied by to get scores, which are clipped to [-1, 1]; None
            for the elements themselves.
        symmetric: whether C is symmetric. Only elements of its lower triangle are then added.
    """

    threshold: float
    absolute: bool
    excludes_self: bool
    scales: Array | None = None
    symmetric: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Elements of some rows and columns of C, row by row. `counts` has the number of elements per row.

    `mirrors` says whether they are mirror images of elements that were found.
    """

    rows: Range
    cols: Range
    counts: Array
    columns: Array
    scores: Array
    mirrors: bool = False

    def mirrored(self) -> "_Part":
        """Return the mirror images of the elements that are not on C's diagonal, also row by row."""
        rows = np.repeat(np.arange(*self.rows), self.counts)
        columns, scores, (left, right) = self.columns, self.scores, self.cols
        if self.rows[0] < right:
            away = columns != rows
            rows, columns, scores = rows[away], columns[away], scores[away]
        at = (columns - left).astype(np.uint32)
        # NumPy sorts 16-bit integers by radix, in a tenth of the time.
        order = np.argsort(at.astype(np.uint16), kind="stable")
        if right - left > 1 << 16:
            order = order[np.argsort((at[order] >> 16).astype(np.uint16), kind="stable")]
        counts = np.bincount(at, minlength=right - left)
        return _Part(self.cols, self.rows, counts, rows[order], scores[order], mirrors=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Elements of some rows and columns of C, as a device returns them."""

    rows: Range
    cols: Range
    segments: Array
    elements: Array

    def part(self) -> _Part:
        segments, (top, bottom) = self.segments, self.rows
        order = np.lexsort((segments["first"], segments["row"]))
        sizes = segments["count"][order].astype(np.int64)
        # The elements of the segments in this order, one segment after the other.
        shift = segments["first"][order].astype(np.int64) - (np.cumsum(sizes) - sizes)
        ordered = self.elements[np.repeat(shift, sizes) + np.arange(len(self.elements))]
        counts = np.bincount(segments["row"][order], sizes, bottom - top).astype(np.int64)
        columns, scores = ordered["index"].astype(np.int64), np.ascontiguousarray(ordered["score"])
        return _Part(self.rows, self.cols, counts, columns, scores)


def _with_mirror(found: _Part | _Found) -> tuple[_Part, ...]:
    part = found.part() if isinstance(found, _Found) else found
    return part, part.mirrored()


def _alone(found: _Part | _Found) -> tuple[_Part, ...]:
    return (found.part() if isinstance(found, _Found) else found,)


class SparseMatrix:
    """A C of which some elements are kept. It is a `Matrix` and `Collecting`, but it cannot be read."""

    def __init__(
        self, name: str, shape: tuple[int, int], score: np.dtype[Any], rule: Rule, limit: int
    ) -> None:
        """Keep elements as scores of dtype `score`, in at most `limit` bytes of memory."""
        self.name, self.shape, self.dtype = name, shape, score
        self.layout: Layout = InMemory(itemsize=score.itemsize)
        self._rule, self._limit = rule, limit
        self._scales = None if rule.scales is None else rule.scales.astype(score)
        # Parts are sorted while the device is computing others.
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="oocgemm-sparse")
        self._parts: list[Future[tuple[_Part, ...]]] = []
        self._bytes, self._adding = 0, Lock()
        self._ordered: tuple[Array, Array, Array] | None = None

    def read(self, rows: Range, cols: Range, out: Array) -> None:
        raise AssertionError("elements that are not kept are unknown")

    def write(self, rows: Range, cols: Range, data: Array) -> None:
        """Keep the elements of a block that the rule selects."""
        scores = data
        if self._scales is not None:
            scores = data * (self._scales[slice(*rows), None] * self._scales[slice(*cols)])
            np.clip(scores, -1, 1, out=scores)  # keeps NaN
        bound = self.dtype.type(self._rule.threshold)
        kept = (np.abs(scores) if self._rule.absolute else scores) >= bound
        if cols[1] > rows[0]:
            across, down = np.arange(*cols), np.arange(*rows)[:, None]
            if self._rule.symmetric:
                kept &= across <= down - self._rule.excludes_self
            elif self._rule.excludes_self:
                kept &= across != down
        at, columns = np.nonzero(kept)
        counts = np.bincount(at, minlength=rows[1] - rows[0])
        self._add(_Part(rows, cols, counts, columns + cols[0], scores[at, columns]), len(columns))

    def put(self, rows: Range, cols: Range, segments: Array, elements: Array) -> None:
        """Keep the elements of a block that a device has found (`oocgemm.backends.base.SEGMENTS`)."""
        self._add(_Found(rows, cols, segments, elements), len(elements))

    def _add(self, part: "_Part | _Found", count: int) -> None:
        with self._adding:
            self._bytes += (1 + self._rule.symmetric) * count * (8 + self.dtype.itemsize)
            if self._bytes > self._limit:
                self._pool.shutdown(wait=False, cancel_futures=True)
                raise ExecutionError(
                    f"the elements found so far take {format_size(self._bytes)}, more than the "
                    f"{format_size(self._limit)} of memory for them: pass a larger threshold"
                )
            if count:
                act = _with_mirror if self._rule.symmetric else _alone
                self._parts.append(self._pool.submit(act, part))

    def csr(self) -> tuple[Array, Array, Array]:
        """Return all elements row by row, in ascending order of columns: row starts, columns, and scores.

        Call this after all elements have been added.
        """
        if self._ordered is None:
            self._ordered = self._order()
        return self._ordered

    def settle(self, at: Array, scores: Array, kept: Array) -> None:
        """Replace the scores of the elements `at` these numbers, and drop those that are not `kept`."""
        starts, columns, every = self.csr()
        every[at] = scores
        dropped = at[~kept]
        rows = np.searchsorted(starts, dropped, side="right")
        counts = np.diff(starts) - np.bincount(rows, minlength=len(starts))[1:]
        self._ordered = (
            np.append(0, np.cumsum(counts)),
            np.delete(columns, dropped),
            np.delete(every, dropped),
        )

    def _order(self) -> tuple[Array, Array, Array]:
        with self._pool as pool:
            # The parts of a row are in the order of their columns. That of its diagonal is before its mirror
            # image, which may have the same first column.
            parts = [part for each in self._parts for part in each.result()]
            self._parts.clear()
            parts.sort(key=lambda part: (part.cols[0], part.mirrors))
            totals = np.zeros(self.shape[0] + 1, np.int64)
            for part in parts:
                totals[part.rows[0] + 1 : part.rows[1] + 1] += part.counts
            starts = np.cumsum(totals)
            columns, scores = np.empty(starts[-1], np.int64), np.empty(starts[-1], self.dtype)

            def place(part: _Part, firsts: Array) -> None:
                """Copy the elements of a part. Those of a row go behind number `firsts` of the row."""
                shift = firsts - (np.cumsum(part.counts) - part.counts)
                to = np.repeat(shift, part.counts) + np.arange(len(part.columns))
                columns[to], scores[to] = part.columns, part.scores

            free, placed = starts[:-1].copy(), []
            for part in parts:
                rows = slice(*part.rows)
                placed.append(pool.submit(place, part, free[rows].copy()))
                free[rows] += part.counts
            for each in placed:
                each.result()
        return starts, columns, scores

    def fingerprint(self) -> dict[str, object] | None:
        return None

    def describe(self) -> dict[str, object]:
        return described(self, "memory")

    def identities(self) -> set[object]:
        return set()
