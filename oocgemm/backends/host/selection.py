"""Selects the largest elements of the rows of C with NumPy."""

import numpy as np

from oocgemm.backends.base import Array

# Elements of C that are searched at once. The temporary arrays of this many elements fit into a CPU cache.
PIECE = 1 << 17


def select(kept: Array, sums: Array, scales: Array | None, at: tuple[int, int], excludes_self: bool) -> None:
    """Update the selected elements of some rows of C with those of a tile.

    Args:
        kept: the selected elements (`SELECTED`), one row for each row of C. All bytes of elements that stand
            for none are `NONE`.
        sums: the tile's elements of these rows, in the accumulator's dtype.
        scales: what rows and columns of C are multiplied by, if they are scaled. They are then clipped.
        at: the row and the column of C of the first of `sums`.
        excludes_self: whether elements on C's diagonal are left out.
    """
    (top, left), width = at, sums.shape[1]
    height, score = max(1, PIECE // max(1, width)), kept.dtype["score"]
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
    # Of a row, all elements that are not smaller than its last selected element are candidates.
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

    In long rows, it is the `rank`-th largest of the maxima of groups of columns. It is close, because few of
    the largest elements are in the same group. With 12000 columns, it takes a tenth of the time.
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
    # Of each row, the first `count` elements.
    starts = np.searchsorted(line, touched)
    best[touched] = every[order[starts[:, None] + np.arange(count)]]
