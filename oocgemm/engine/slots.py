"""The host slots: one arena of host memory, and the prefaulting of its C slots."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from oocgemm.backends.base import numpy_dtype, slot_offsets
from oocgemm.engine.blocks import slot_views
from oocgemm.errors import ExecutionError
from oocgemm.planning import Operation, Plan, Slot
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT, payload_bytes, slot_bytes
from oocgemm.stores import Array
from oocgemm.system.memory import allocate

PAGE = 4096


class HostSlots:
    """The memory of a plan's host slots.

    Reads fault their slots in. A C slot that the device writes to first is prefaulted by one thread instead,
    because a device writes slowly to memory without pages.
    """

    def __init__(self, plan: Plan, pin: Callable[[Sequence[Array]], object]) -> None:
        """Allocate the arena. `pin` pins a slot's memory from its start on, and is called with resident pages
        only."""
        self._plan = plan
        self._pin = pin
        self._offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
        self.arena = allocate(size)
        # Of a C slot: its bytes, and those of its data, which precede the checksums.
        self._c_bytes, self._c_data_bytes = (
            count(plan.problem, plan.tile, plan.slots.strip)["host", "C"]
            for count in (slot_bytes, payload_bytes)
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="oocgemm-prefault")
        c = [] if plan.problem.reads_c else [slot for slot in self._offsets if slot.operand == "C"]
        self._waiting, self._prefaulted = c, dict[Slot, Future[None]]()
        self._starting = Lock()

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the part of a slot that an operation's block fills, as stored: groups of columns, each
        contiguous."""
        problem = self._plan.problem
        name = {"A": problem.a_dtype, "B": problem.b_dtype}.get(slot.operand, problem.c_dtype)
        return slot_views(self._plan, operation, self.arena[self._offsets[slot] :], numpy_dtype(name))

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the memory behind the strip in a C slot: the checksums that a Download copies with the
        strip."""
        start = self._offsets[slot]
        return self.arena[start + self._c_data_bytes : start + self._c_bytes]

    def start_prefault(self) -> None:
        """Start to prefault and pin the C slots, in a thread. Does nothing if that has been started.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        with self._starting:
            try:
                for slot in self._waiting:
                    self._prefaulted[slot] = self._pool.submit(self._prefault, self._offsets[slot])
            except RuntimeError as error:
                raise ExecutionError(f"the system refuses a thread that prefaults memory: {error}") from error
            self._waiting = []

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a slot has been prefaulted, if that is needed; start to prefault if nobody has."""
        if slot in self._waiting:
            self.start_prefault()
        if slot in self._prefaulted:
            self._prefaulted[slot].result()

    def _prefault(self, start: int) -> None:
        self.arena[start : start + self._c_bytes : PAGE] = 0
        self._pin([self.arena[start : start + self._c_data_bytes]])

    def close(self) -> None:
        """Join the thread and drop the arena, whose memory is freed with its last view."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.arena = self.arena[:0].copy()
