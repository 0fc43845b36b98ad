"""Host memory that a device copies from and to: slots, and operands where they lie.

The driver takes no orders for copies or kernels while it locks pages, a third of a millisecond for 16 MiB, and a thread whose
order waits there keeps the interpreter from all others. So memory is locked in parts, in turn with orders, and what is needed
last, operands, when nothing else is waiting.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any

from cupy.cuda import runtime

from oocgemm.backends.base import Locks
from oocgemm.errors import BackendError
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT
from oocgemm.planning.tiling import round_up
from oocgemm.planning.units import format_size

PART = 16 << 20
LOOK_AGAIN = 50e-6  # seconds


class HostMemory:
    """What is locked of it for one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # Where each locked range begins, and the last ends, by where the slot begins.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        self._waiting: set[int] = set()  # threads for it, those that lock operands excepted
        self.locks = Locks(self._lock_operand, self._unlock)

    @contextmanager
    def ordering(self) -> Iterator[None]:
        """For as long as the driver is given orders."""
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

    def lock_slot(self, address: int, size: int) -> Sequence[int]:
        """Lock the pages of a slot as far as it is used, and say where one locked range ends and another begins. Those that touched
        them have done it before, beside the copies: here it would hold up all other orders. Touched pages take little time,
        untouched ones ten times as much."""
        borders = self._slots.setdefault(address, [address])
        end = round_up(address + size, HOST_ALIGNMENT)
        while borders[-1] < end:
            part = min(PART, end - borders[-1])
            try:
                with self.ordering(), self._device:
                    runtime.hostRegister(borders[-1], part, 0)
            except runtime.CUDARuntimeError as error:
                raise BackendError(
                    f"the system refuses to lock {format_size(end - borders[-1])} of host memory ({error}): "
                    "pass a smaller --host-memory, or raise ulimit -l"
                ) from error
            borders.append(borders[-1] + part)
        return borders

    def _lock_operand(self, address: int, size: int) -> None:
        while self._waiting:
            sleep(LOOK_AGAIN)
        with self._driver, self._device:
            runtime.hostRegister(address, size, 0)

    def _unlock(self, address: int) -> None:
        with self._device:
            runtime.hostUnregister(address)

    def close(self) -> None:
        """Unlock the slots."""
        for borders in self._slots.values():
            for begin in borders[:-1]:
                with suppress(Exception):  # after a failed launch every call fails
                    self._unlock(begin)
        self._slots = {}
