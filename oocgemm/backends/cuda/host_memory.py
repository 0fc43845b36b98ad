"""Pins host memory that a device copies from and to: host slots, and operands in the caller's memory.

While the driver pins pages (0.3 ms per 16 MiB), it blocks every thread that submits a copy or a kernel, and
such a thread holds the GIL. So memory is pinned in parts, and pinning and submitting take turns. Operands,
which are needed last, are pinned only when no other thread waits.
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

PART = 16 << 20  # bytes pinned by one call
POLL_INTERVAL = 50e-6  # seconds


class HostMemory:
    """The host memory that is pinned for one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # By address of a slot: where each of its pinned ranges begins, and where the last one ends.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        self._waiting: set[int] = set()  # threads that wait for `_driver`, except those that pin operands
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
        """Pin the used part of a slot, as far as it is not pinned yet, and return the borders of its pinned
        ranges.

        The threads that fault the pages in call this first, while other copies run. A call during `submit`
        then finds nothing left to pin: it would delay every other submission, by ten times as much if the
        pages are not resident.

        Raises:
            BackendError: the system refuses.
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
