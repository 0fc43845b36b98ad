"""Finds out from CUDA events when work ran on the device, in time of the host's clock."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, ClassVar, Self

import cupy

from oocgemm.backends.base import Token
from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.errors import ExecutionError
from oocgemm.planning import Plan, Slot
from oocgemm.values import dataclass

# Maximum age, in nanoseconds, of a `Clock`'s reference event. CUDA returns the time between two events as
# float32, so its rounding error grows with that time. Up to 2 s, the error is below 0.1 microseconds.
REANCHOR_NS = 2_000_000_000
# The streams and their priorities; -1 is higher than 0. The device starts thread blocks of a high-priority
# stream first. So a Prepare, or a kernel that a Download needs, does not have to wait until all blocks of the
# current Multiply have started.
STREAMS = {"h2d": 0, "h2d-c": 0, "peer": -1, "prepare": -1, "compute": 0, "d2h": -1, "d2h-turned": -1}
# The stream of the checksum kernels. One panel can be uploaded, on another stream, while the checksums of the
# previous panel are computed.
SUMS = "sums"
# In runs that take less than MAX_SPIN seconds, a thread that waits for the device keeps its core busy. An
# idle core takes 0.05 ms to wake, and then runs slowly for a while: the Python code before and after the
# waits took twice as long.
MAX_SPIN = 0.25


def spins(plan: Plan) -> bool:
    """Return whether the thread that waits for the device spins: no other thread needs the cores."""
    return plan.all_direct and plan.setting.enqueues and plan.prediction.total < MAX_SPIN


class Clock:
    """Converts the times of CUDA events to the host's clock.

    CUDA only gives the time between two events. So the clock records a reference event at a known host time,
    to which it adds the time from the reference event to another event.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.name = ""  # of the device in error messages, if the run uses several devices
        with device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            before, after, self._event = self._probe()
        self._time = (before + after) // 2

    def host(self, event: Any) -> int:
        """Return the host time of a completed event, in ns. Only one thread at a time may call this."""
        if perf_counter_ns() - self._time > REANCHOR_NS:
            with self.device:
                before, after, new = self._probe()
            # Compute the host time of the new reference event from the old one. The device's clock drifts, so
            # the result may be wrong. But it is known to be between `before` and `after`: clip it to these.
            self._time, self._event = min(max(self._at(new), before), after), new
        return self._at(event)

    def _at(self, event: Any) -> int:
        return self._time + int(cuda_calls.milliseconds(self._event, event) * 1e6)

    def _probe(self) -> tuple[int, int, Any]:
        """Return host times before and after an event, and the event, of the shortest of five probes."""
        probes = []
        for _ in range(5):
            event = cupy.cuda.Event()
            before = perf_counter_ns()
            event.record(self._stream)
            event.synchronize()
            probes.append((before, perf_counter_ns(), event))
        return min(probes, key=lambda probe: probe[1] - probe[0])


# The stream name in the tokens of copies through the ring. The ring has several streams of its own.
RING = "ring"


@dataclass(frozen=True, slots=True)
class Work:
    """Some launches on a stream. The event `start` is recorded before them, the event `end` after them.

    `issued` is the host time, in nanoseconds, at which the first launch call returned. `finish` waits for
    what the host has to do afterwards, and raises if that fails.
    """

    start: Any
    issued: int
    end: Any
    finish: Callable[[], None] | None = None

    @classmethod
    def on(cls, stream: Any, launches: Sequence[cuda_calls.Launch], *, spins: bool = False) -> Self:
        """Make launches on a stream between two events.

        If `spins`, a thread that waits for the second event keeps its core busy, and continues sooner.
        """
        start, end = cupy.cuda.Event(block=True), cupy.cuda.Event(block=not spins)
        return cls(start, cuda_calls.record_around(launches, start, end, stream), end)

    def interval(self, clock: Clock) -> tuple[int, int]:
        """Return the host times, in nanoseconds, at which the work started and ended.

        Call it only when the event `end` has completed.
        """
        # On an idle stream, the event `start` completes as soon as it is recorded. That may be long before
        # the first launch, if a library loads a kernel in between. Take `issued` then.
        start, end = clock.host(self.start), clock.host(self.end)
        return min(max(start, self.issued), end), end


@dataclass(frozen=True, slots=True)
class CudaToken:
    """The handle of an operation that was submitted to a CUDA device. Implements `Token`.

    Attributes:
        stream: the name of the stream on which `end` is recorded.
        own: the launches of the operation, without those that compute checksums.
        end: the event that completes when the operation and the launches for its checksums have ended.
        clock: converts the times of events to host times.
        check: raises an error if the operation found an element that does not fit C's integer dtype. Called
            after `end` has completed. None if the operands are not int8.
        noting: records how long the checksums took. Called after `end` has completed. None without checksums.
        uploaded: the device slot that an Upload fills. None for other operations, and without checksums.
        bytes: how many bytes were copied; None if the number is `Operation.bytes`.
    """

    stream: str
    own: Work
    end: Any
    clock: Clock
    check: Callable[[], None] | None = None
    noting: Callable[[], None] | None = None
    uploaded: Slot | None = None
    bytes: int | None = None
    times: ClassVar[None] = None

    def synchronize(self) -> None:
        if not cuda_calls.ended(self.end):
            try:
                with self.clock.device:  # not the current device of this thread, which may have failed
                    self.end.synchronize()
            except Exception as error:
                if not self.clock.name:
                    raise
                raise ExecutionError(f"{self.clock.name}: {error}") from error
        if self.own.finish is not None:
            self.own.finish()
        if self.check is not None:
            self.check()

    def interval(self) -> tuple[int, int]:
        if self.noting is not None:
            self.noting()
        return self.own.interval(self.clock)


def own_tokens(after: Sequence[Token], clock: Clock) -> list[CudaToken]:
    """Return those tokens that belong to the session with this clock: its streams may wait for their events.

    The calling thread waits for all other tokens, such as those of other devices: a stream that waits for an
    event of a device that has failed might wait forever.
    """
    own = list[CudaToken]()
    for token in after:
        if isinstance(token, CudaToken) and token.clock is clock:
            own.append(token)
        else:
            token.synchronize()
    return own
