"""Measure the processor time of this process, and that of all programs on the same cores.

The difference shows whether other programs slowed a run down.
"""

import os
from dataclasses import dataclass
from time import process_time


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Counters of processor time, read at one moment. Only the difference of two readings has a meaning.

    - `own`: the seconds that this process used.
    - `busy`: the seconds that all programs together used on the cores that this process may run on.
    """

    own: float
    busy: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """Read the counters now. Return None on a system without /proc/stat.

        `busy` advances in clock ticks, 10 ms on Linux, so shorter intervals cannot be measured.
        """
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = 0.0
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                for name, *ticks in (line.split() for line in file):
                    if name in cores:  # add user, nice, system, irq, softirq, steal; skip idle and iowait
                        busy += sum(int(ticks[i]) for i in (0, 1, 2, 5, 6, 7))
        except (OSError, IndexError, ValueError):
            return None
        return cls(process_time(), busy / os.sysconf("SC_CLK_TCK"))


def used_since(start: CpuTimes | None) -> dict[str, float] | None:
    """Return the processor time used since `start`, as a dict of numbers; None if it cannot be measured.

    - "cores": the number of cores that this process may use.
    - "own_seconds": the time of this process.
    - "busy_seconds": the time of all programs together on these cores.
    """
    if start is None or (end := CpuTimes.now()) is None:
        return None
    own = end.own - start.own
    busy = max(own, end.busy - start.busy)  # `busy` is rounded to ticks: its increase can be less than `own`
    return {"cores": len(os.sched_getaffinity(0)), "own_seconds": own, "busy_seconds": busy}
