"""Pins host memory that a device copies from and to: host slots (buffers), and operands of the caller.

While the driver pins pages (0.3 ms per 16 MiB), it blocks every thread that submits a copy or a kernel. A
blocked thread keeps the GIL, so all of Python would stop. Therefore memory is pinned in parts, and a lock
makes pinning and submitting take turns. A thread that pins the caller's operands takes the lock only while no
other thread waits for it: most parts of the operands are needed much later.
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

# Maximum number of bytes of a host slot that one call of the driver pins.
PART = 16 << 20
# Interval, in seconds, at which a thread that pins an operand polls whether other threads wait for the lock.
POLL_INTERVAL = 50e-6


class HostMemory:
    """Pins and unpins host memory for one device. Remembers which parts of host slots are pinned."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # For the address of each host slot: where its pinned ranges begin, and where the last of them ends.
        self._slots: dict[int, list[int]] = {}
        self._driver = threading.Lock()
        # Ids of the threads that wait for `_driver`. A thread that pins operands is not included.
        self._waiting: set[int] = set()
        self.pinner = Pinner(self._pin_operand, self._unpin)

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

        The thread that has faulted in the slot's pages calls this. The submission of a copy calls it again,
        and usually finds the bytes pinned. Without the first call, the submission would have to pin them.
        That would delay all submissions, and take ten times as long if the pages are not resident.

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
                # After a failed launch every CUDA call raises. Go on with the other ranges in that case.
                with suppress(Exception):
                    self._unpin(begin)
        self._slots = {}
