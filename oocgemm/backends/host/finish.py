"""Finishes strips of C on the host, when their products have been added up.

- `finish` applies alpha and beta, and casts to C's dtype.
- `run_chain` applies the epilogue.
- A `Keeper` updates what is kept of the rows of C, one class per sink (`oocgemm.planning.sinks`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from oocgemm.backends.base import Array, Finishing, Numbers, too_large
from oocgemm.backends.host.blas import gemm
from oocgemm.planning import GemmProblem, Op, Operation
from oocgemm.planning.cost.footprint import FINISH_ARRAYS, FINISH_PIECE
from oocgemm.planning.device_memory import NONE
from oocgemm.planning.emulation import EXACT_LIMIT
from oocgemm.planning.schedule.operations import mirrored_columns
from oocgemm.planning.sinks import Applied, Largest, Reduced, Sink, Step
from oocgemm.planning.tiling import length


def finish(sums: Array, alpha: float, beta: float, result: Array, workspace: Array) -> None:
    """Compute ``result = alpha sums + beta result`` in the dtype of sums, and round to the dtype of result.

    Args:
        sums: the accumulated products, C-contiguous. The dtype is float32, or float64 if all values are
            integers.
        alpha, beta: scalars. beta = 0 never reads result.
        result: array of the shape of sums, C-contiguous.
        workspace: bytes for `FINISH_ARRAYS` temporary arrays of `FINISH_PIECE` elements in the dtype of sums.
            A smaller workspace is slower. Minimum: one element per array.

    Raises:
        ExecutionError: result has an integer dtype, and an element is outside the range of that dtype, or
            is so large (2^53) that float64 may have rounded it.
    """
    limits = np.iinfo(result.dtype) if result.dtype.kind == "i" else None
    scalars = sums.dtype.type(alpha), sums.dtype.type(beta)
    # Pieces of fixed length keep the temporary arrays in the cache, for any shape.
    piece = min(FINISH_PIECE, workspace.size // (FINISH_ARRAYS * sums.itemsize))
    spaces = workspace.view(sums.dtype)[: FINISH_ARRAYS * piece].reshape(FINISH_ARRAYS, piece)
    flat, old_flat = sums.reshape(-1), result.reshape(-1)
    with np.errstate(all="ignore"):  # Inf and NaN propagate silently, as in BLAS
        for start in range(0, flat.size, piece):
            old = old_flat[start : start + piece]
            value, kept, size = spaces[:, : old.size]
            np.multiply(flat[start : start + piece], scalars[0], out=value)
            if limits is not None:
                np.abs(value, out=size)
            if beta:
                np.multiply(old, scalars[1], out=kept, dtype=sums.dtype)
                value += kept
                if limits is not None:
                    size += np.abs(kept, out=kept)
            if limits is not None and not (
                size.max() < EXACT_LIMIT and limits.min <= value.min() and value.max() <= limits.max
            ):
                raise too_large(result.dtype.name)
            old[...] = value


# Elements that are changed at once. Their temporary arrays fit into a CPU cache.
PIECE = 1 << 15


def run_chain(
    steps: Sequence[Step],
    numbers: Sequence[Numbers],
    sums: Array,
    scalars: tuple[float, float],
    result: Array,
    *,
    reads: bool,
) -> None:
    """Apply a chain to ``alpha sums + beta result``, and round to the dtype of `result`.

    Args:
        steps: the steps of the chain (`oocgemm.planning.sinks`).
        numbers: per step, its numbers per row and per column of the strip. None stands for 1.
        sums: a strip of products.
        scalars: alpha and beta.
        result: array of the strip's shape, which may be `sums`.
        reads: whether `result` contains the further matrix D or the old C.
    """
    alpha, beta = scalars
    height = max(1, PIECE // max(1, sums.shape[1]))
    for top in range(0, len(sums), height):
        here = slice(top, top + height)
        with np.errstate(all="ignore"):
            c = sums[here].astype(np.float64)
            c *= alpha
            d = result[here].astype(np.float64) if reads else c
            if beta:
                c += beta * d
            for step, (rows, cols) in zip(steps, numbers, strict=True):
                u = 1.0 if rows is None else rows[here, None]
                c = _changed(step, c, u, 1.0 if cols is None else cols, d, sums.dtype)
            result[here] = c


def _changed(
    step: Step, c: Array, u: Array | float, v: Array | float, d: Array, summed: np.dtype[np.generic]
) -> Array:
    """Return the elements c after a step. The step may change c in place."""
    match step.kind:
        case "scale":
            c *= step.value * u * v
        case "rank_one":
            c += step.value * u * v
        case "add":
            c += step.value * d
        case "divide":
            c /= d
        case "divide_or_zero":
            c /= d
            c[d == 0] = 0
        case "correlation":
            c *= step.value * u * v
            np.clip(c, -1, 1, out=c)  # keeps NaN
        case "gaussian":
            c *= -2
            c += u
            c += v
            np.maximum(c, 0, out=c)  # keeps NaN
            c *= -step.value
            # The exponential is that of the dtype of the sums, as on a GPU.
            c = np.exp(c.astype(np.float32 if summed == np.float32 else np.float64))
            c = c.astype(np.float64, copy=False)
        case "identical":
            c[(u == v) & ~np.isnan(c)] = 1
        case "squared":
            c *= c
            c -= step.value * (1 - c)
        case "within":
            c[~(np.abs(u - v) <= step.value)] = 0
        case _:
            raise AssertionError(f"{step} is unknown")
    return c


def reduce_rows(reduction: str, strip: Array, kept: Array, *, begins: bool) -> None:
    """Add the sums, the sums of squares or the largest elements of the rows of a strip to `kept`.

    With `begins`, `kept` has no value yet. NaN is the largest element.
    """
    height = max(1, PIECE // max(1, strip.shape[1]))
    for top in range(0, len(strip), height):
        c, to = strip[top : top + height].astype(np.float64), kept[top : top + height]
        with np.errstate(all="ignore"):
            if reduction == "max":
                found = c.max(1)
                to[...] = found if begins else np.maximum(to, found)
                continue
            if reduction == "sumsq":
                c *= c
            found = c.sum(1)
            to[...] = found if begins else to + found


# Elements of C that are searched at once. The temporary arrays of this many elements fit into a CPU cache.
SEARCHED = 1 << 17


def select(kept: Array, sums: Array, scales: Array | None, at: tuple[int, int], excludes_self: bool) -> None:
    """Update the selected elements of some rows of C with those of a tile.

    Args:
        kept: the selected elements (`SELECTED`), one row for each row of C. All bytes of an unused element
            are `NONE`.
        sums: the tile's elements of these rows, in the accumulator's dtype.
        scales: factors of rows and columns of C, or None. Scaled elements are clipped to [-1, 1].
        at: the row and the column in C of the first element of `sums`.
        excludes_self: whether elements on C's diagonal are left out.
    """
    (top, left), width = at, sums.shape[1]
    height, score = max(1, SEARCHED // max(1, width)), kept.dtype["score"]
    if scales is not None:
        scales = scales.astype(score)
    for start in range(0, len(sums), height):
        scores, best = sums[start : start + height].astype(score), kept[start : start + height]
        first = top + start
        if scales is not None:
            scores *= scales[first : first + len(scores), None] * scales[left : left + width]
            np.clip(scores, -1, 1, out=scores)  # keeps NaN
        _merge(scores, left, first - left if excludes_self else None, best)


def _merge(scores: Array, left: int, diagonal: int | None, best: Array) -> None:
    """Merge rows of scores into the selected elements of these rows.

    Args:
        scores: of the columns of C from `left` on.
        left: the first of these columns.
        diagonal: the column in `scores` of C's diagonal element of the first row, which may lie outside; None
            to leave no element out.
        best: the selected elements.
    """
    count, (height, width) = best.shape[1], scores.shape
    # The candidates of a row are all elements that are not smaller than its last selected element.
    least = best["score"][:, -1:]
    if (unfilled := np.isnan(least[:, 0])).any() and width > count:
        least = least.copy()
        least[unfilled, 0] = _lower_bound(scores[unfilled], count + 1)  # one may be left out
    candidates = ~(scores < least)
    if diagonal is not None:
        own = np.arange(max(0, -diagonal), max(0, min(height, width - diagonal)))
        candidates[own, own + diagonal] = False
    found = np.flatnonzero(candidates)
    if not found.size:
        return
    rows, cols = np.divmod(found, width)
    merge = _merge_by_keys if best["score"].dtype == np.float32 else _merge_by_fields
    merge(best, rows, scores.ravel()[found] + scores.dtype.type(0), cols + left)  # makes -0 equal to 0


def _lower_bound(scores: Array, rank: int) -> Array:
    """Return a lower bound on the `rank`-th largest element of each row, of at least `rank` elements.

    In long rows, the bound is the `rank`-th largest of the maxima of groups of columns. It is close to that
    element, because few of the largest elements are in the same group. For 12000 columns, this takes a tenth
    of the time.
    """
    groups = max(8 * rank, scores.shape[1] // 16)
    if (size := scores.shape[1] // groups) > 1:
        scores = np.fmax.reduce(scores[:, : size * groups].reshape(-1, size, groups), axis=1)
    ranked, last = np.where(np.isnan(scores), -np.inf, scores), scores.shape[1] - rank
    found: Array = np.partition(ranked, last, axis=1)[:, last]
    return found


def _merge_by_keys(best: Array, rows: Array, scores: Array, indices: Array) -> None:
    """Merge elements into `best`, whose scores are float32. `rows` are ascending.

    A key of 64 bits contains the score and the index of an element, so that keys are in the order of ranks.
    """
    count, starts = best.shape[1], np.flatnonzero(np.diff(rows, prepend=-1))
    touched, lengths = rows[starts], np.diff(starts, append=rows.size)
    keys = np.zeros((touched.size, count + lengths.max()), np.uint64)
    old = best[touched]
    keys[:, :count] = _keys(old["score"], old["index"])
    line = np.repeat(np.arange(touched.size), lengths)
    keys[line, count + np.arange(rows.size) - starts[line]] = _keys(scores, indices)
    keys.sort(axis=1)
    keys = keys[:, : -count - 1 : -1]
    old["index"] = ~keys & 0xFFFFFFFF
    high = (keys >> 32).astype(np.uint32)
    score = np.where(high >> 31, high ^ 0x80000000, ~high).view(np.float32)
    old["score"] = np.where(high == 0, np.float32(np.nan), score)
    best[touched] = old


def _keys(scores: Array, indices: Array) -> Array:
    """Return keys of elements: larger scores and, among equal ones, smaller indices have larger keys."""
    bits = np.ascontiguousarray(scores).view(np.uint32)
    high = np.where(bits >> 31, ~bits, bits | 0x80000000)
    high[np.isnan(scores)] = 0  # below -inf
    return (high.astype(np.uint64) << 32) | (~indices.astype(np.uint32)).astype(np.uint64)


def _merge_by_fields(best: Array, rows: Array, scores: Array, indices: Array) -> None:
    """Merge elements into `best`, whose scores have any dtype. `rows` are ascending."""
    count, touched = best.shape[1], np.unique(rows)
    old = best[touched]
    every = np.empty(old.size + rows.size, best.dtype)
    every[: old.size], every["score"][old.size :] = old.ravel(), scores
    every["index"][old.size :] = indices
    line = np.concatenate((np.repeat(touched, count), rows))
    # NaN is sorted to the end.
    order = np.lexsort((every["index"], -every["score"], line))
    line = line[order]
    # Keep the first `count` elements of each row.
    starts = np.searchsorted(line, touched)
    best[touched] = every[order[starts[:, None] + np.arange(count)]]


class Keeper(ABC):
    """Updates the elements that are kept for the rows of C.

    Args of the constructor:
        problem: the product.
        rows: what is kept, `Sink.per_row` elements for each row of C.
        finishing: the numbers that a Finish uses.
        factor: the matrix V, if the sink has one.
    """

    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        self._problem, self._rows, self._finishing, self._factor = problem, rows, finishing, factor

    @abstractmethod
    def keep(self, op: Operation, strip: Array) -> None:
        """Add a strip of C, which is in the accumulator's dtype."""


class _Largest(Keeper):
    def __init__(self, problem: GemmProblem, rows: Array, finishing: Finishing, factor: Array | None) -> None:
        super().__init__(problem, rows, finishing, factor)
        rows.view(np.uint8)[...] = NONE

    def keep(self, op: Operation, strip: Array) -> None:
        """Update the elements of the rows of a strip, and of its columns that are mirrored."""
        sink = self._problem.sink
        assert isinstance(sink, Largest)
        cols = mirrored_columns(op.m, op.n) if self._problem.cover.halves else (0, 0)
        for (m, n), block in (((op.m, op.n), strip), ((cols, op.m), strip[:, : length(cols)].T)):
            if length(m):
                at = m[0], n[0]
                select(self._rows[slice(*m)], block, self._finishing.scales, at, sink.excludes_self)


class _Reduced(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        sink = self._problem.sink
        assert isinstance(sink, Reduced)
        reduce_rows(sink.reduction, strip, self._rows[slice(*op.m), 0], begins=op.first)


class _Applied(Keeper):
    def keep(self, op: Operation, strip: Array) -> None:
        assert self._factor is not None
        beta = 0.0 if op.first else 1.0
        gemm(Op.N, Op.N, 1.0, strip, self._factor[slice(*op.n)], beta, self._rows[slice(*op.m)])


KEEPERS: dict[type[Sink], type[Keeper]] = {Largest: _Largest, Reduced: _Reduced, Applied: _Applied}
