"""Finds out from CUDA events when work ran on the device, in time of the host's clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Self

import cupy

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.planning import Slot

# Maximum age, in nanoseconds, of the event to which times are relative; then another one is recorded. CUDA
# returns times between events as float32 milliseconds, which are exact to a microsecond only up to 2 s.
REANCHOR_NS = 2_000_000_000


class Clock:
    """Converts the times of CUDA events to the host's clock.

    CUDA only gives the time between two events. The clock records an event at a known host time, and adds to
    that time.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            before, after, self._event = self._probe()
        self._time = (before + after) // 2

    def host(self, event: Any) -> int:
        """Return the host time of a completed event, in nanoseconds of `perf_counter_ns`.

        Only one thread at a time may call this.
        """
        if perf_counter_ns() - self._time > REANCHOR_NS:
            with self._device:
                before, after, new = self._probe()
            # The event completed between the two host times `before` and `after`. These may be far apart,
            # because the thread may lose the GIL between them. The device's clock gives the time more
            # precisely, unless it has drifted out of that interval.
            self._time, self._event = min(max(self._at(new), before), after), new
        return self._at(event)

    def _at(self, event: Any) -> int:
        return self._time + int(cuda_calls.milliseconds(self._event, event) * 1e6)

    def _probe(self) -> tuple[int, int, Any]:
        """Record an event; return the host times before and after it, and the event.

        Of several tries, return the one with the shortest time between.
        """
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
    """Some launches on a stream, between the events `start` and `end`.

    `issued` is the host time, in nanoseconds, at which the first launch call returned.
    """

    start: Any
    issued: int
    end: Any

    @classmethod
    def on(cls, stream: Any, launches: Sequence[cuda_calls.Launch]) -> Self:
        """Make the launches on a stream, between two events."""
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=True)
        return cls(start, cuda_calls.record_around(launches, start, end, stream), end)

    def interval(self, clock: Clock) -> tuple[int, int]:
        """Return the host times, in nanoseconds, at which the work started and ended. Call it only after the
        end."""
        # On an idle stream the start event completes as soon as it is recorded. That may be long before the
        # work is launched, for example if a library loads a kernel first. So the work starts no earlier than
        # the first launch call returned.
        start, end = clock.host(self.start), clock.host(self.end)
        return min(max(start, self.issued), end), end


@dataclass(frozen=True, slots=True)
class CudaToken:
    """The handle of an operation that was submitted to a CUDA device. Implements `Token`.

    The operation has ended when the event `end` on `stream` has completed. `own` is the operation's work
    without its checksums. After the end, `check` raises an error if the operation failed, and `noting`
    records the time that the checksums took. `uploaded` is the slot that an Upload fills, if checksums are
    computed.
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
