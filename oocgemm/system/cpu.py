"""Measure processor time: of this process, and of all programs on the same cores."""

import os
from dataclasses import dataclass
from time import process_time


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Hold processor seconds so far:

    `own` of this process, `busy` of the cores that it may use, by any program.
    """

    own: float
    busy: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """Read the counters; None where the system has none.

        The cores' counters advance in ticks, 10 ms on Linux.
        """
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = 0.0
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                for name, *ticks in (line.split() for line in file):
                    if name in cores:  # user, nice, system, irq, softirq, steal
                        busy += sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7))
        except (OSError, IndexError, ValueError):
            return None
        return cls(process_time(), busy / os.sysconf("SC_CLK_TCK"))


def used_since(start: CpuTimes | None) -> dict[str, float] | None:
    """Return the processor seconds since `start`: of this process, and of all programs on its cores."""
    end = CpuTimes.now()
    if start is None or end is None:
        return None
    own = end.own - start.own
    busy = max(own, end.busy - start.busy)  # the counters may differ by a tick
    return {"cores": len(os.sched_getaffinity(0)), "own_seconds": own, "busy_seconds": busy}
