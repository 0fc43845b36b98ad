"""When work on a device was done, by the host's clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Self

import cupy

from oocgemm.backends.cuda import calls as cuda_calls

REANCHOR_NS = 2_000_000_000  # float32 milliseconds stay finer than a microsecond for this long


class Clock:
    """Brings times of the device to the host's clock, by an event whose host time is known."""

    def __init__(self, device: Any) -> None:
        self._device = device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            before, after, self._event = self._probe()
        self._time = (before + after) // 2

    def host(self, event: Any) -> int:
        """Host time of a recorded event that is done, in nanoseconds. One thread at a time."""
        if perf_counter_ns() - self._time > REANCHOR_NS:
            with self._device:
                before, after, new = self._probe()
            # Other threads can keep this one from reading the clock for a while: go by the device's own clock as far as
            # the readings allow.
            self._time, self._event = min(max(self._at(new), before), after), new
        return self._at(event)

    def _at(self, event: Any) -> int:
        return self._time + int(cuda_calls.milliseconds(self._event, event) * 1e6)

    def _probe(self) -> tuple[int, int, Any]:
        """An event, and host times before and after it."""
        probes = []
        for _ in range(5):
            event = cupy.cuda.Event()
            before = perf_counter_ns()
            event.record(self._stream)
            event.synchronize()
            probes.append((before, perf_counter_ns(), event))
        return min(probes, key=lambda probe: probe[1] - probe[0])


@dataclass(frozen=True, slots=True)
class Work:
    """Launches between two events; `issued` is the host's time when the first of them had been made."""

    start: Any
    issued: int
    end: Any

    @classmethod
    def on(cls, stream: Any, launches: Sequence[cuda_calls.Launch]) -> Self:
        """Launch on a stream."""
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        return cls(start, cuda_calls.record_around(launches, start, end, stream), end)

    def interval(self, clock: Clock) -> tuple[int, int]:
        """Host times of the start and the end of what is done, in nanoseconds."""
        # On an idle stream an event is done as soon as it is recorded, before the work that follows has come: a library may
        # have to load a kernel first.
        start, end = clock.host(self.start), clock.host(self.end)
        return min(max(start, self.issued), end), end


@dataclass(frozen=True, slots=True)
class CudaToken:
    """An operation that is done when all has been done on `stream` up to `end`.

    `own` is its own work. `check` raises if it, once it has ended, has failed. `noting` tells of the checksums that it
    takes, once it has ended.
    """

    stream: str
    own: Work
    end: Any
    clock: Clock
    check: Callable[[], None] | None = None
    noting: Callable[[], None] | None = None

    def synchronize(self) -> None:
        if not cuda_calls.ended(self.end):
            self.end.synchronize()
        if self.check is not None:
            self.check()

    def interval(self) -> tuple[int, int]:
        if self.noting is not None:
            self.noting()
        return self.own.interval(self.clock)
