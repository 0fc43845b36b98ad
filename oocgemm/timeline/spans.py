"""Spans, timelines and intervals of time.

A span records where and when one operation ran, and what it waited for. A timeline has all spans of a run. An
interval is a pair (start, end) in nanoseconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from threading import Lock
from typing import Any, NamedTuple

from oocgemm.values import dataclass

Interval = tuple[int, int]
# Lanes, in the order in which data flows through them.
LANES = ("read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write")
MAX_INTERVALS = 4000
# The use of CPU cores is not reported for runs of fewer seconds: Linux counts it in ticks of 10 ms.
MIN_CPU_WALL = 0.5


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, as disjoint intervals in ascending order. Empty intervals are left out.

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


class Span(NamedTuple):
    """One operation of a run, with the times at which it started and ended.

    `start` and `end` are in nanoseconds since `gemm` was called. `waits` lists the ids of the operations
    that had to end before this one could start. `device` and `worker` are numbers that count from 0; the
    worker of a run in one process is 0.
    """

    id: int
    kind: str
    operand: str
    lane: str
    stream: str
    device: int
    tile: tuple[int, int]
    step: int
    start: int
    end: int
    bytes: int
    flops: int
    waits: tuple[int, ...] = ()
    worker: int = 0


@dataclass(frozen=True)
class Timeline:
    """All spans of a run in program order.

    `wall` is the wall time of the run in nanoseconds. `header` describes the run: its plan, machine and
    operands. `unfinished` is set if the run was stopped or is still running. `wall` is then the end of the
    last recorded span.
    """

    spans: tuple[Span, ...]
    wall: int
    header: Mapping[str, Any] = field(default_factory=dict)
    unfinished: bool = False


class BusyTime:
    """Sum time intervals in bounded memory.

    Threads append the intervals in which they were busy; appending is thread-safe. A second in which three
    threads were busy adds one second to `covered` and three to `total`.

    At most `MAX_INTERVALS` intervals are stored: old ones are replaced by the length of their union. If a
    later interval overlaps the replaced ones, `covered` is slightly too small.
    """

    def __init__(self) -> None:
        self._recent: list[Interval] = []
        self._folded = self._folded_until = self._total = 0
        self._lock = Lock()

    def append(self, interval: Interval) -> None:
        """Add an interval (start, end), in nanoseconds."""
        with self._lock:
            self._total += max(0, interval[1] - interval[0])
            self._recent.append((max(interval[0], self._folded_until), interval[1]))
            if len(self._recent) < MAX_INTERVALS:
                return
            merged = union(self._recent)
            old, self._recent = merged[: -MAX_INTERVALS // 4], merged[-MAX_INTERVALS // 4 :]
            if old:
                self._folded += length(old)
                self._folded_until = old[-1][1]

    @property
    def covered(self) -> int:
        """Return the length of the union of all intervals, in nanoseconds."""
        return self._folded + length(union(self._recent))

    @property
    def total(self) -> int:
        """Return the sum of the lengths of all intervals, in nanoseconds."""
        return self._total
