"""Pins host memory that a device copies from and to: host slots (buffers), and operands of the caller.

While the driver pins pages (0.3 ms per 16 MiB), it blocks every thread that submits a copy or a kernel. Such
a thread keeps the GIL, so all of Python would stop. Therefore memory is pinned in parts, and pinning and
submitting take turns by a lock. Operands are pinned only while no thread waits to submit.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any

import cupy
from cupy.cuda import runtime

from oocgemm.backends.base import Array, Pinner, slot_offsets
from oocgemm.errors import BackendError
from oocgemm.planning import Plan
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT
from oocgemm.planning.tiling import round_up
from oocgemm.planning.units import format_size
from oocgemm.system.memory import allocate

# Maximum number of bytes of a host slot that one call of the driver pins.
PART = 16 << 20
# Interval, in seconds, at which a thread that pins an operand polls whether other threads wait to submit.
POLL_INTERVAL = 50e-6
# If all host slots together have at most this many bytes, they stay allocated and pinned for the next run of
# the process. To fault in and pin their pages takes 0.1 s per GiB, which is long for a small product.
MAX_KEPT = 128 << 20
# At least this many bytes are allocated, so that small runs of several sizes can use the same memory.
MIN_KEPT = 4 << 20
# Size of a page in bytes. Memory is faulted in by one write per page.
PAGE = 4096
# The memory that is kept between runs: device number -> array.
_kept: dict[int, Array] = {}


class HostMemory:
    """Pins and unpins host memory for one device. Remembers which parts of host slots are pinned."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # Address of a host slot -> addresses where its pinned ranges begin, and where the last one ends.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        # Ids of the threads that wait for `_driver`. A thread that pins operands is not included.
        self._waiting: set[int] = set()
        self._arena: Array | None = None
        self.pinner = Pinner(self._pin_operand, self._unpin)

    def take_arena(self, plan: Plan) -> Array | None:
        """Return pinned, resident memory for all host slots of a plan; None if it exceeds `MAX_KEPT`.

        This is memory that an earlier run has left, if its size fits the slots and the plan's host budget.
        `close` keeps the memory for the next run.

        Raises:
            BackendError: the system refuses to pin the memory.
        """
        (_, size), budget = slot_offsets(plan, "host", HOST_ALIGNMENT), plan.budgets.host
        arena = _kept.pop(self._device.id, None)
        # Memory that this run does not use is freed: it would come on top of the run's budget.
        if arena is not None and (size > MAX_KEPT or not size <= arena.nbytes <= budget):
            self._unpin(arena.ctypes.data)
            arena = None
        if size > MAX_KEPT:
            return None
        if arena is None:
            arena = allocate(min(max(MIN_KEPT, 1 << max(0, size - 1).bit_length()), max(size, budget)))
            arena[::PAGE] = 0  # faults in the pages
            self._register(arena.ctypes.data, arena.nbytes)
        self._arena = arena
        return arena[:size]

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Hold the lock that makes pinning and submitting take turns.

        A thread that pins operands lets all threads that wait here go first.
        """
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            self._driver.acquire()
        finally:
            self._waiting.discard(thread)
        try:
            yield
        finally:
            self._driver.release()

    def pin_slot(self, address: int, size: int) -> Sequence[int]:
        """Pin the first `size` bytes of a host slot, except what is pinned already.

        Call it after the slot's pages have been faulted in: pinning is then ten times as fast. Submitting a
        copy calls it again, so that the memory is pinned in any case.

        Returns:
            The addresses where the slot's pinned ranges begin, and the end of the last one.

        Raises:
            BackendError: the system refuses to pin the memory.
        """
        end = round_up(address + size, HOST_ALIGNMENT)
        if self._arena is not None and 0 <= address - self._arena.ctypes.data < self._arena.nbytes:
            return [address, end]  # the arena is one pinned range
        borders = self._slots.setdefault(address, [address])
        while borders[-1] < end:
            part = min(PART, end - borders[-1])
            self._register(borders[-1], part)
            borders.append(borders[-1] + part)
        return borders

    def _register(self, address: int, size: int) -> None:
        try:
            with self.submitting(), self._device:
                runtime.hostRegister(address, size, 0)
        except runtime.CUDARuntimeError as error:
            raise BackendError(
                f"the system refuses to pin {format_size(size)} of host memory ({error}): "
                "pass a smaller --host-memory, or raise ulimit -l"
            ) from error

    def _pin_operand(self, address: int, size: int) -> None:
        while self._waiting:
            sleep(POLL_INTERVAL)
        with self._driver, self._device:
            runtime.hostRegister(address, size, 0)

    def _unpin(self, address: int) -> None:
        with self._device:
            runtime.hostUnregister(address)

    def close(self) -> None:
        """Keep the memory of `take_arena` for the next run. Unpin all other slots."""
        if self._arena is not None:
            arena, self._arena = self._arena, None
            other = _kept.setdefault(self._device.id, arena)
            if other is not arena:  # a concurrent run has returned its memory
                with suppress(Exception):
                    self._unpin(arena.ctypes.data)
        for borders in self._slots.values():
            for begin in borders[:-1]:
                # After a failed launch, every CUDA call raises. Unpin the remaining ranges all the same.
                with suppress(Exception):
                    self._unpin(begin)
        self._slots = {}


def release() -> None:
    """Unpin and free the memory that is kept for the next run."""
    while _kept:
        device, arena = _kept.popitem()
        with cupy.cuda.Device(device):
            runtime.hostUnregister(arena.ctypes.data)
