"""Pins host memory that a device copies from and to: host slots (buffers), and operands of the caller.

While the driver pins pages (0.3 ms per 16 MiB), it blocks every thread that submits a copy or a kernel. A
blocked thread keeps the GIL, so all of Python would stop. Therefore memory is pinned in parts, and a lock
makes pinning and submitting take turns. The caller's operands are pinned only while no other thread waits for
the lock, since they are needed last.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any

from cupy.cuda import runtime

from oocgemm.backends.base import Pinner
from oocgemm.errors import BackendError
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT
from oocgemm.planning.tiling import round_up
from oocgemm.planning.units import format_size

PART = 16 << 20  # maximum number of bytes of a host slot that one call pins
# Seconds after which a thread that pins an operand checks again whether other threads wait for the lock.
POLL_INTERVAL = 50e-6


class HostMemory:
    """Pins and unpins host memory for one device, and keeps track of it."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # Per host slot (its address): the addresses where its pinned ranges begin, and where the last ends.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        self._waiting: set[int] = set()  # the threads that wait for `_driver`, but not those to pin operands
        self.pinner = Pinner(self._pin_operand, self._unpin)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Keep the driver from pinning pages while the calling thread submits to it."""
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

        The thread that faults the slot's pages in calls this right after that. When an operation is
        submitted, the slot's memory is checked again, but is usually pinned by then. Pinning it only at that
        time would delay all submissions, and take ten times as long if the pages are not resident.

        Returns:
            The addresses where the slot's pinned ranges begin, and the end of the last one.

        Raises:
            BackendError: the system refuses to pin the memory.
        """
        borders = self._slots.setdefault(address, [address])
        end = round_up(address + size, HOST_ALIGNMENT)
        while borders[-1] < end:
            part = min(PART, end - borders[-1])
            try:
                with self.submitting(), self._device:
                    runtime.hostRegister(borders[-1], part, 0)
            except runtime.CUDARuntimeError as error:
                raise BackendError(
                    f"the system refuses to pin {format_size(end - borders[-1])} of host memory ({error}): "
                    "pass a smaller --host-memory, or raise ulimit -l"
                ) from error
            borders.append(borders[-1] + part)
        return borders

    def _pin_operand(self, address: int, size: int) -> None:
        while self._waiting:
            sleep(POLL_INTERVAL)
        with self._driver, self._device:
            runtime.hostRegister(address, size, 0)

    def _unpin(self, address: int) -> None:
        with self._device:
            runtime.hostUnregister(address)

    def close(self) -> None:
        """Unpin the slots."""
        for borders in self._slots.values():
            for begin in borders[:-1]:
                with suppress(Exception):  # after a failed launch every CUDA call fails
                    self._unpin(begin)
        self._slots = {}
