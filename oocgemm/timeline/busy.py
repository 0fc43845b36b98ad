"""Sum the time in which threads did one kind of work, such as reading, while the run goes on."""

from threading import Lock

from oocgemm.timeline.intervals import Interval, length, union

MAX_INTERVALS = 4000


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
