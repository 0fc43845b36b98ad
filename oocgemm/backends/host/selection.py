"""Select the largest elements of rows of C, by compiled code (`kernels/host/select.c`) or else by NumPy."""

import ctypes
from typing import Any

import numpy as np

from oocgemm.backends.base import Array, Factors
from oocgemm.backends.host import blas
from oocgemm.system.installed import compiled

# Elements of C that NumPy searches at once. The temporary arrays of this many elements fit into a CPU cache.
SEARCHED = 1 << 17
# Numbers of dtypes of elements in kernels/host/host.h.
DTYPES = {"float32": 0, "float64": 1, "int32": 2}


class _Selection(ctypes.Structure):
    """struct ooc_selection of kernels/host/host.h."""

    _fields_ = (
        *(("kept", ctypes.c_void_p), ("count", ctypes.c_size_t), ("dtype", ctypes.c_size_t)),
        *(("sums", ctypes.c_void_p), ("down", ctypes.c_ssize_t), ("along", ctypes.c_ssize_t)),
        *((name, ctypes.c_size_t) for name in ("rows", "cols", "top", "left")),
        *(("row_factors", ctypes.c_void_p), ("col_factors", ctypes.c_void_p)),
        *(("nearness", ctypes.c_int), ("excludes_self", ctypes.c_int)),
    )


def in_dtype(factors: Factors | None, dtype: np.dtype[Any]) -> Factors | None:
    """Return contiguous factors in the dtype of scores."""
    if factors is None:
        return None
    rows = np.ascontiguousarray(factors.rows, dtype)
    same = factors.cols is factors.rows
    return factors._replace(rows=rows, cols=rows if same else np.ascontiguousarray(factors.cols, dtype))


def select(
    kept: Array, sums: Array, factors: Factors | None, at: tuple[int, int], excludes_self: bool
) -> None:
    """Update the selected elements of some rows of C with those of a tile.

    Args:
        kept: the selected elements (`SELECTED`), one row for each row of C, C-contiguous. All bytes of an
            unused element are `NONE`.
        sums: the tile's elements of these rows, in the accumulator's dtype. Its rows or its columns are
            contiguous.
        factors: numbers of rows and columns of C, in the dtype of scores (`in_dtype`), or None.
        at: the row and the column in C of the first element of `sums`.
        excludes_self: whether elements on C's diagonal are left out.
    """
    library = compiled()
    if library is None:
        _select(kept, sums, factors, at, excludes_self)
        return
    down, along = (step // sums.itemsize for step in sums.strides)
    assert kept.flags.c_contiguous
    assert 1 in (down, along)
    given = _Selection(
        *(kept.ctypes.data, kept.shape[1], DTYPES[sums.dtype.name], sums.ctypes.data, down, along),
        *(*sums.shape, *at),
        *((None, None) if factors is None else (factors.rows.ctypes.data, factors.cols.ctypes.data)),
        *(factors is not None and factors.nearness, excludes_self),
    )
    if library.ooc_select(ctypes.byref(given), ctypes.c_size_t(blas.threads())):
        raise MemoryError


def _select(
    kept: Array, sums: Array, factors: Factors | None, at: tuple[int, int], excludes_self: bool
) -> None:
    """Do the same with NumPy, more slowly."""
    (top, left), width = at, sums.shape[1]
    height, score = max(1, SEARCHED // max(1, width)), kept.dtype["score"]
    for start in range(0, len(sums), height):
        scores, best = sums[start : start + height].astype(score), kept[start : start + height]
        first = top + start
        if factors is not None:
            u, v = factors.rows[first : first + len(scores), None], factors.cols[left : left + width]
            if factors.nearness:
                scores *= 2
                scores -= u + v
                np.minimum(scores, 0, out=scores)  # keeps NaN
            else:
                scores *= u * v
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
    _insert(best, rows, scores.ravel()[found] + scores.dtype.type(0), cols + left)  # makes -0 equal to 0


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


def _insert(best: Array, rows: Array, scores: Array, indices: Array) -> None:
    """Insert elements into the selected ones. `rows` are ascending."""
    count, changed = best.shape[1], np.unique(rows)
    old = best[changed]
    every = np.empty(old.size + rows.size, best.dtype)
    every[: old.size], every["score"][old.size :] = old.ravel(), scores
    every["index"][old.size :] = indices
    line = np.concatenate((np.repeat(changed, count), rows))
    # NaN is sorted to the end.
    order = np.lexsort((every["index"], -every["score"], line))
    line = line[order]
    # Keep the first `count` elements of each row.
    starts = np.searchsorted(line, changed)
    best[changed] = every[order[starts[:, None] + np.arange(count)]]
