"""How long a run was busy with something, added up as it goes."""

from threading import Lock

from oocgemm.timeline.metrics import Interval, length, union

MAX_INTERVALS = 4000


class BusyTime:
    """Add up intervals as they end, in bounded memory: the time in which any was under way, and their summed lengths.

    Threads append intervals about as they end. The oldest are folded into a number once there are `MAX_INTERVALS`; an interval
    that begins before those that were folded counts from their end on.
    """

    def __init__(self) -> None:
        self._recent: list[Interval] = []
        self._folded = self._folded_until = self._total = 0
        self._folding = Lock()

    def append(self, interval: Interval) -> None:
        """Add an interval in nanoseconds."""
        with self._folding:
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
        """Nanoseconds in which any interval was under way."""
        return self._folded + length(union(self._recent))

    @property
    def total(self) -> int:
        """Summed lengths of all intervals, in nanoseconds."""
        return self._total
