"""Keep streams, the clock, loaded kernels and an arena of a session for the next one on the same device.

Creating and destroying these takes longer than a small product. A `Warm` belongs to one session at a time.
Idle ones are kept per device, at most `MAX_IDLE`, of which at most one has an arena.

A large arena is kept too, but only for `BRIEF_SECONDS`. If it were freed and allocated again, the driver
would clear its memory while the first blocks are uploaded. For an arena of 8 GiB, that took 20 ms on an H100,
and freeing it took 3 to 9 ms.
"""

import threading
from contextlib import suppress
from typing import Any, Protocol

import cupy
from cupy.cuda import runtime

from oocgemm.backends.cuda.events import Clock
from oocgemm.backends.cuda.launch import Kernels, properties
from oocgemm.errors import OutOfMemoryError
from oocgemm.planning import Plan
from oocgemm.planning.units import format_size


def allocate(size: int) -> int:
    """Allocate `size` bytes on the current device, and return their address. Raises `OutOfMemoryError`."""
    try:
        return int(runtime.malloc(max(size, 1)))
    except runtime.CUDARuntimeError as error:
        free = runtime.memGetInfo()[0]
        raise OutOfMemoryError(
            f"the device refuses {format_size(size)}, {format_size(free)} are free: "
            "pass a smaller --device-memory"
        ) from error


# Maximum number of idle `Warm` objects per device.
MAX_IDLE = 2
# An arena that takes more than MAX_KEPT_SHARE of the device's memory is freed after BRIEF_SECONDS. An arena
# that takes more than MAX_BRIEF_SHARE is freed when its session closes.
MAX_KEPT_SHARE, MAX_BRIEF_SHARE = 1 / 16, 1 / 4
# For how many seconds a large arena is kept.
BRIEF_SECONDS = 1.0


class Reusable(Protocol):
    """A closed session that can be opened again, as long as its `Warm` and the arena are kept."""

    def runs(self, plan: Plan, kernel: str) -> bool:
        """Return whether the session can run a plan with a kernel once more."""

    def drop(self) -> None:
        """Free what the session keeps besides its arena. It cannot be opened again."""


class Warm:
    """The streams, the clock, the loaded kernels and the arena of one session on one device.

    Everything is created at its first use. Call the methods while the device is the current one.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._streams: dict[tuple[str, int], Any] = {}
        self._clock: Clock | None = None
        self._kernels: Kernels | None = None
        self.arena = 0  # its address
        self.size = 0  # bytes of the arena
        self.session: Reusable | None = None  # the last session, if it can be opened again

    @property
    def kernels(self) -> Kernels:
        """Our own kernels, which stay loaded."""
        if self._kernels is None:
            self._kernels = Kernels(self._device)
        return self._kernels

    @property
    def clock(self) -> Clock:
        """The clock that converts times of the device to times of the host."""
        if self._clock is None:
            self._clock = Clock(cupy.cuda.Device(self._device))
        return self._clock

    @property
    def share(self) -> float:
        """The share of the device's memory that the arena takes."""
        return float(self.size / properties(self._device)["totalGlobalMem"])

    def stream(self, name: str, priority: int) -> Any:
        """Return the stream of a name and priority."""
        key = name, priority
        if key not in self._streams:
            self._streams[key] = cupy.cuda.Stream(non_blocking=True, priority=priority)
        return self._streams[key]

    def holds(self, size: int, budget: int) -> bool:
        """Return whether the arena has at least `size` bytes, and does not exceed the device budget."""
        return 0 < size <= self.size <= max(size, budget)

    def reserve(self, size: int, budget: int) -> int:
        """Return the address of an arena of `size` bytes or more. Raises `OutOfMemoryError`."""
        if not self.holds(size, budget):
            self.free()
            self.arena = allocate(size)
            self.size = max(size, 1)
        return self.arena

    def keep(self, session: Reusable | None = None) -> None:
        """Keep this `Warm` for the next session, which may be `session` again. No work may be in flight."""
        with _lock:
            self.session = session
            idle = _idle.setdefault(self._device, [])
            kept = len(idle) < MAX_IDLE
            small = self.share <= MAX_BRIEF_SHARE
            has_arena = kept and small and not any(other.size for other in idle)
            if not has_arena:
                self.free()
            if kept:
                idle.append(self)
            else:
                self.drop()
            if self.share > MAX_KEPT_SHARE:
                _shrink_later()

    def drop(self) -> None:
        if self.session is not None:
            self.session.drop()
            self.session = None

    def free(self) -> None:
        """Free the arena. After a failed launch, every CUDA call raises: errors are ignored."""
        self.drop()
        address, self.arena, self.size = self.arena, 0, 0
        if address:
            with suppress(Exception):
                runtime.free(address)


_idle: dict[int, list[Warm]] = {}
_lock = threading.Lock()
_timers: list[threading.Timer] = []  # the latest one that frees large arenas


def take(device: int) -> Warm:
    """Return an idle `Warm` of a device, or a new one. The caller owns it.

    If an idle `Warm` has an arena, it is returned, because its memory counts towards the caller's budget.
    """
    with _lock:
        idle = _idle.get(device)
        if not idle:
            return Warm(device)
        idle.sort(key=lambda warm: warm.size)
        found = _taken(idle, idle[-1])
        found.drop()
        return found


def reuse(device: int, plan: Plan, kernel: str) -> Reusable | None:
    """Return the session that the last run of a plan has left; None if there is none. The caller owns it."""
    with _lock:
        idle = _idle.get(device, [])
        for warm in idle:
            if warm.session is not None and warm.session.runs(plan, kernel):
                return _taken(idle, warm).session
    return None


def _taken(idle: list[Warm], warm: Warm) -> Warm:
    """Remove a `Warm` from the idle ones, and return it. The caller must hold the lock."""
    if warm.share > MAX_KEPT_SHARE:
        _cancel()
    idle.remove(warm)
    return warm


def _shrink_later() -> None:
    """After `BRIEF_SECONDS`, free the large arenas that are idle then. The caller must hold the lock."""
    _cancel()
    timer = threading.Timer(BRIEF_SECONDS, shrink)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started: the next session frees the arena, or takes it
        timer.start()
        _timers.append(timer)


def _cancel() -> None:
    while _timers:
        _timers.pop().cancel()


def shrink() -> None:
    """Free the large arenas of all idle `Warm` objects."""
    with _lock:
        for device, idle in _idle.items():
            for warm in idle:
                if warm.share > MAX_KEPT_SHARE:
                    with cupy.cuda.Device(device):
                        warm.free()


def idle_bytes(device: int) -> int:
    """Return the bytes of device memory that idle arenas take. The next session takes or frees them."""
    with _lock:
        return sum(warm.size for warm in _idle.get(device, ()))


def release() -> None:
    """Free all idle `Warm` objects. Those in use are kept or freed when their sessions close."""
    with _lock:
        found = dict(_idle)
        _idle.clear()
    for device, idle in found.items():
        with cupy.cuda.Device(device):
            for warm in idle:
                warm.free()
