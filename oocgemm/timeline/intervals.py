"""Intervals of time: their union, their intersection and their length."""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as disjoint intervals in ascending order. Empty ones are left out.

    >>> union([(5, 7), (0, 3), (2, 4), (9, 9)])
    [(0, 4), (5, 7)]
    """
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Return the sum of the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intervals of time that both lists cover.

    The intervals of each list must be disjoint and in ascending order, as `union` returns them.
    """
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found
