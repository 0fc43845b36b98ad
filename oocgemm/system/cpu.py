"""Processor time: what this process has used, and what others have on the same cores."""

import os
from dataclasses import dataclass
from time import process_time


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor seconds so far: of this process, and of the cores that it may use, whoever used them."""

    own: float
    busy: float

    @classmethod
    def now(cls) -> "CpuTimes | None":
        """Read the counters; None where the system has none. Those of the cores are in ticks, of 10 ms on Linux."""
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
    """Processor seconds since `start`: those of this process, and those of all programs on the cores it may use."""
    end = CpuTimes.now()
    if start is None or end is None:
        return None
    own = end.own - start.own
    busy = max(own, end.busy - start.busy)  # a tick more or less
    return {"cores": len(os.sched_getaffinity(0)), "own_seconds": own, "busy_seconds": busy}
