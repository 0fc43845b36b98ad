"""The host side of a run: buffers in host memory, and threads that move blocks between them and the stores.

A buffer is called a host slot. Zero-copy blocks need none: the device copies them from or to the caller's
memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from oocgemm.backends.base import Pinner
from oocgemm.engine.blocks import located
from oocgemm.engine.slots import HostSlots
from oocgemm.engine.transfers import OnPart, Transfers
from oocgemm.engine.zero_copy import ZeroCopy
from oocgemm.planning import Kind, Operation, Plan, Slot, Tier
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix


class Staging:
    """Moves blocks of the operands between stores and host memory, and returns where each block is.

    A block is in its host slot (a buffer) or, if it is zero-copy, in the caller's memory.
    """

    def __init__(
        self,
        plan: Plan,
        operands: Mapping[str, Matrix],
        pin: Callable[[Sequence[Array]], object] = lambda columns: None,
        pinner: Pinner | None = None,
        arena: Array | None = None,
    ) -> None:
        """Allocate the host slots and start the threads.

        Args:
            plan: has the sizes of the slots and the layouts of the operands.
            operands: the matrices A, B and C, by name.
            pin: pins the memory of a slot. The thread that has faulted the pages in calls it.
            pinner: pins operands in the caller's memory, so that the device can copy them directly; None if
                the device needs no pinned memory.
            arena: memory for all slots, resident and pinned; None to allocate it.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._plan = plan
        self._pin = pin
        self._slots = HostSlots(plan, pin, arena)
        self._transfers = Transfers(plan, operands)
        self._read_before: set[Slot] = set()
        try:
            self._zero_copy = ZeroCopy(plan, operands, pinner)
        except BaseException:
            self._slots.close()
            self._transfers.close()
            raise

    @property
    def arena(self) -> Array:
        """The memory of all host slots, as bytes."""
        return self._slots.arena

    @property
    def retried(self) -> list[str]:
        """The error messages of the reads that failed and were tried again, one per retry."""
        return self._transfers.retried

    def is_in_place(self, operation: Operation, slot: Slot) -> bool:
        """Return whether an operation's block is in the caller's memory instead of its slot (zero-copy)."""
        if slot.tier is Tier.HOST:
            return self._zero_copy.get(slot) is not None
        return self._plan.is_zero_copy(operation)

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the memory for an operation's block in a host slot, as arrays of the stored operand.

        Each array is a range of the block's columns, contiguous in memory.
        """
        return self._slots.columns(slot, operation)

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the checksums in a host slot for C. They follow the data; a Download copies both."""
        return self._slots.checksum_bytes(slot)

    def groups(self, operation: Operation, columns: Sequence[Array]) -> Iterator[tuple[Range, Range, Array]]:
        """Yield (rows, columns, array) for each group of columns of a panel or strip.

        `rows` and `columns` are ranges of the operand as it is stored, before op().
        """
        return located(self._plan, operation, columns)

    def upload_source(self, operation: Operation) -> Sequence[Array]:
        """Return the host memory that an Upload copies from: its host slot, or the caller's memory."""
        slot = operation.reads[0].slot
        return self._zero_copy.get(slot) or self.columns(slot, operation)

    def prepare_download(self, operation: Operation) -> Sequence[Array]:
        """Return the host memory that a Download copies to: its host slot, or the caller's C.

        Waits until the slot has been prefaulted.
        """
        slot = operation.writes[0].slot
        if self._zero_copy.assign(operation):
            in_place = self._zero_copy.get(slot)
            assert in_place is not None
            return in_place
        self._slots.await_prefault(slot)
        return self.columns(slot, operation)

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a host slot has been prefaulted. Return at once if stores, not the device, fill it."""
        self._slots.await_prefault(slot)

    def transfer(
        self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None
    ) -> Sequence[Array]:
        """Run a Read (store to host slot) or a Write (host slot to store) in the reader or writer threads.

        Args:
            operation: the Read or Write.
            columns: the slot's memory, as one contiguous array per range of columns.
            on_part: called for each part of a Read by the thread that has read it. If None, the block may be
                zero-copy: it is then not read.

        Returns:
            Where the block is now: `columns`, or a view of the caller's memory.

        Raises:
            ExecutionError: a part cannot be read or written; the message names the store and the range.
        """
        if operation.kind is not Kind.READ:
            self._transfers.write(operation, columns)
            return columns
        slot = operation.writes[0].slot
        # Prefaulting the slots for C would delay the first reads. So it starts after them, when a slot is
        # filled for the second time.
        if slot in self._read_before and not self._plan.layouts.c.pinned:
            self._slots.start_prefault()
        self._read_before.add(slot)
        if on_part is None and self._zero_copy.assign(operation):
            return [self._zero_copy.block(operation)]
        self._transfers.read(operation, columns, on_part)
        if slot.tier is Tier.HOST:
            self._pin(columns)
        return columns

    def inspect(self, operation: Operation, columns: Sequence[Array], on_part: OnPart) -> None:
        """Call `on_part` for each part of a block of C before it is written, in the writer threads."""
        self._transfers.inspect(operation, columns, on_part)

    def stop(self) -> None:
        """Stop retrying reads and pinning operands, and wake the threads that wait for either."""
        self._transfers.stop()
        self._zero_copy.stop()

    def close(self) -> None:
        """Join the threads and drop the host slots. The caller's memory stays pinned until `release`."""
        self._slots.close()
        self._transfers.close()
        self._zero_copy.clear()

    def release(self) -> None:
        """Unpin the caller's memory. Call it when no copy from or to that memory is in flight."""
        self._zero_copy.release()
