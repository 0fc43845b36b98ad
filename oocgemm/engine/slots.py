"""The host slots: buffers in host memory for blocks of A, B and C, all in one allocation (the arena)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from threading import Lock

from oocgemm.backends.arena import slot_offsets
from oocgemm.backends.base import numpy_dtype
from oocgemm.engine.blocks import slot_views
from oocgemm.errors import ExecutionError
from oocgemm.planning import Operation, Plan, Slot
from oocgemm.planning.cost.coding import slot_frames
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT, payload_bytes, slot_bytes
from oocgemm.stores import Array
from oocgemm.system.resources import allocate

PAGE = 4096
# Number of threads that fault in the pages of a slot for C, and the bytes that each faults in at a time. One
# thread took 12 to 25 ms for 64 MiB on a host of an H100.
FAULTING_THREADS, FAULTED_BYTES = 4, 8 << 20


class HostSlots:
    """Allocates a plan's host slots, and prefaults the slots for C if the old C is not read.

    Reads fault in the pages of the slots that they fill. If the old C is not read, the slots for C are filled
    only by copies from the device, which are slow if pages are missing. So these slots are prefaulted, one
    after the other.
    """

    def __init__(
        self, plan: Plan, pin: Callable[[Sequence[Array]], object], arena: Array | None = None
    ) -> None:
        """Allocate the arena, one block of memory for all slots.

        Args:
            plan: determines the number and the sizes of the slots.
            pin: pins the memory of the arrays in a slot. Called after their pages have been faulted in.
            arena: memory for all slots, resident and pinned; None to allocate it.
        """
        self._plan = plan
        self._pin = pin
        self._offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
        self.arena = allocate(size) if arena is None else arena
        prefaulted = plan.problem.reads_c or arena is not None
        c = [] if prefaulted else [slot for slot in self._offsets if slot.operand == "C"]
        self._waiting, self._prefaulted = c, dict[Slot, Future[None]]()
        self._starting = Lock()

    @cached_property
    def _c_sizes(self) -> tuple[int, int]:
        """Bytes of a slot for C: those of a strip, and those of the strip and its checksums."""
        plan = self._plan
        given, frames = (plan.problem, plan.tile, plan.slots.strip), self._frames
        return frames or payload_bytes(*given)["host", "C"], slot_bytes(*given, frames)["host", "C"]

    @cached_property
    def _frames(self) -> int:
        """Bytes of a slot for a strip of C that the GPU encodes; 0 if it does not."""
        return slot_frames(self._plan.setting, self._plan.tile, self._plan.slots.strip)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="oocgemm-prefault")

    @cached_property
    def _faulting(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(FAULTING_THREADS, thread_name_prefix="oocgemm-fault")

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the memory for an operation's block in a slot, as arrays of the stored operand.

        Each array is a range of the block's columns, contiguous in memory. If the GPU encodes C, the result
        for a strip is one array: the bytes of the slot.
        """
        if slot.operand == "C" and self._frames:
            return [self.arena[self._offsets[slot] :][: self._frames]]
        name = self._plan.problem.dtypes[slot.operand]
        return slot_views(self._plan, operation, self.arena[self._offsets[slot] :], numpy_dtype(name))

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the checksums in a slot for C, as bytes. They follow the data; a Download copies both."""
        start, (data, whole) = self._offsets[slot], self._c_sizes
        return self.arena[start + data : start + whole]

    def start_prefault(self) -> None:
        """Start to prefault and pin the slots for C, in a thread. A second call does nothing.

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
        """Wait until a slot has been prefaulted. Start the prefault if it has not been started.

        Return at once for a slot that a store is read into, which needs no prefault.
        """
        if slot in self._waiting:
            self.start_prefault()
        if slot in self._prefaulted:
            self._prefaulted[slot].result()

    def _prefault(self, start: int) -> None:
        data, whole = self._c_sizes
        slot = self.arena[start : start + whole]

        def fault_in(at: int) -> None:
            slot[at : at + FAULTED_BYTES : PAGE] = 0

        begun = list[Future[None]]()
        try:
            begun += (self._faulting.submit(fault_in, at) for at in range(0, whole, FAULTED_BYTES))
        except RuntimeError:  # the system refuses a thread
            # `submit` has queued its part although no thread started. Cancel it: a later thread would run it,
            # and clear the slot.
            self._faulting.shutdown(wait=True, cancel_futures=True)
            vars(self).pop("_faulting", None)
            slot[::PAGE] = 0
        else:
            for part in begun:
                part.result()
        self._pin([slot[:data]])

    def close(self) -> None:
        """Join the threads that prefault, and drop the arena.

        The memory of the arena is freed when no view of it is left.
        """
        for pool in ("_pool", "_faulting"):
            if pool in vars(self):  # it was used
                vars(self)[pool].shutdown(wait=True, cancel_futures=True)
        self.arena = self.arena[:0].copy()
