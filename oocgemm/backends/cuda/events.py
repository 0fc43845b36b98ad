"""Times of device work on the host's clock, from CUDA events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Self

import cupy

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.planning import Slot

REANCHOR_NS = (
    2_000_000_000  # CUDA returns float32 milliseconds: up to this long they resolve less than a microsecond
)


class Clock:
    """Converts event times to the host's clock, relative to an anchor event whose host time is known."""

    def __init__(self, device: Any) -> None:
        self._device = device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            before, after, self._event = self._probe()
        self._time = (before + after) // 2

    def host(self, event: Any) -> int:
        """Return the host time of a completed event, in nanoseconds of `perf_counter_ns`. One thread at a
        time."""
        if perf_counter_ns() - self._time > REANCHOR_NS:
            with self._device:
                before, after, new = self._probe()
            # The thread may lose the GIL between the event and its clock reading, so the readings only bound
            # the event's time. Within these bounds, the device's own clock is taken.
            self._time, self._event = min(max(self._at(new), before), after), new
        return self._at(event)

    def _at(self, event: Any) -> int:
        return self._time + int(cuda_calls.milliseconds(self._event, event) * 1e6)

    def _probe(self) -> tuple[int, int, Any]:
        """Record an event; return the host times before and after it, and the event. The tightest of several
        tries."""
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
    """Launches between two events. `issued` is the host time at which the first launch call returned."""

    start: Any
    issued: int
    end: Any

    @classmethod
    def on(cls, stream: Any, launches: Sequence[cuda_calls.Launch]) -> Self:
        """Launch on a stream, between two events."""
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        return cls(start, cuda_calls.record_around(launches, start, end, stream), end)

    def interval(self, clock: Clock) -> tuple[int, int]:
        """Return the host times of start and end, in nanoseconds. Only after the work has ended."""
        # On an idle stream the start event completes as soon as it is recorded, perhaps long before the work
        # is launched: a library may load a kernel in between.
        start, end = clock.host(self.start), clock.host(self.end)
        return min(max(start, self.issued), end), end


@dataclass(frozen=True, slots=True)
class CudaToken:
    """An operation that has ended when the event `end` on `stream` has completed.

    `own` is its own work, without checksums. `check`, called after the end, raises if the operation failed.
    `noting`, called after the end, records the time that its checksums took. `uploaded` is the slot that an
    Upload with checksums fills.
    """

    stream: str
    own: Work
    end: Any
    clock: Clock
    check: Callable[[], None] | None = None
    noting: Callable[[], None] | None = None
    uploaded: Slot | None = None

    def synchronize(self) -> None:
        if not cuda_calls.ended(self.end):
            self.end.synchronize()
        if self.check is not None:
            self.check()

    def interval(self) -> tuple[int, int]:
        if self.noting is not None:
            self.noting()
        return self.own.interval(self.clock)
