"""The host side of a run: buffers in host memory, and threads that move blocks between them and the stores.

A buffer is called a host slot. Blocks of operands in host memory need none (`direct`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from oocgemm.backends.base import HostBlock
from oocgemm.engine.blocks import located
from oocgemm.engine.direct import host_block
from oocgemm.engine.slots import HostSlots
from oocgemm.engine.transfers import OnPart, Transfers, source_of
from oocgemm.planning import Kind, Operation, Plan, Slot, Tier
from oocgemm.planning.tiling import Range
from oocgemm.stores import Array, Matrix, memory
from oocgemm.stores.base import Retries


class Staging:
    """Moves blocks of the operands between stores and host slots, and returns where each block is."""

    def __init__(
        self,
        plan: Plan,
        operands: Mapping[str, Matrix],
        pin: Callable[[Sequence[Array]], object] = lambda columns: None,
        arena: Array | None = None,
        retries: Retries | None = None,
    ) -> None:
        """Allocate the host slots and start the threads.

        Args:
            plan: has the sizes of the slots and the layouts of the operands.
            operands: the matrices A, B and C, by name.
            pin: pins the memory of a slot. The thread that has faulted the pages in calls it.
            arena: memory for all slots, resident and pinned; None to allocate it.
            retries: repeats reads that fail; None to repeat only those of this object.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._plan = plan
        self._pin = pin
        self._slots = HostSlots(plan, pin, arena)
        self._operands = operands
        self._transfers = Transfers(plan, operands, retries or Retries())
        self._read_before: set[Slot] = set()
        if plan.slots.streams("A") and plan.slots.streams("B"):  # no Read would be delayed
            self._slots.start_prefault()

    @property
    def arena(self) -> Array:
        """The memory of all host slots, as bytes."""
        return self._slots.arena

    @property
    def arrays(self) -> list[Array]:
        """A, B and C, which must be in memory."""
        return [memory(self._operands[operand]) for operand in "ABC"]

    @property
    def retried(self) -> list[str]:
        """The error messages of the reads that failed and were tried again, one per retry."""
        return self._transfers.retried

    def is_in_place(self, operation: Operation) -> bool:
        """Return whether the CPU multiplies an operation's block where it is in the caller's memory."""
        return operation.operand in self._plan.in_place

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

    def upload_source(self, operation: Operation) -> HostBlock:
        """Return the host memory that an Upload copies from: its host slot, or the operand's memory."""
        if self._plan.slots.streams(operation.operand):
            matrix = source_of(self._operands, operation)
            return host_block(self._plan, matrix, operation, self._transfers.read_part)
        return self.columns(operation.reads[0].slot, operation)

    def prepare_download(self, operation: Operation) -> HostBlock:
        """Return the host memory that a Download copies to: its host slot, or C's memory.

        Waits until the slot has been prefaulted.
        """
        if self._plan.slots.streams("C"):
            return host_block(self._plan, self._operands["C"], operation, self._transfers.write_part)
        slot = operation.writes[0].slot
        self._slots.await_prefault(slot)
        return self.columns(slot, operation)

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a host slot has been prefaulted. Return at once if stores, not the device, fill it."""
        self._slots.await_prefault(slot)

    def transfer(self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None) -> None:
        """Run a Read (store to host slot) or a Write (host slot to store) in the reader or writer threads.

        Args:
            operation: the Read or Write.
            columns: the slot's memory, as one contiguous array per range of columns.
            on_part: called for each part of a Read by the thread that has read it.

        Raises:
            ExecutionError: a part cannot be read or written; the message names the store and the range.
        """
        if operation.kind is not Kind.READ:
            self._transfers.write(operation, columns)
            return
        slot = operation.writes[0].slot
        # Prefaulting the slots for C would delay the first reads. So it starts after them, when a slot is
        # filled for the second time.
        if slot in self._read_before:
            self._slots.start_prefault()
        self._read_before.add(slot)
        self._transfers.read(operation, columns, on_part)
        if slot.tier is Tier.HOST:
            self._pin(columns)

    def inspect(self, operation: Operation, columns: Sequence[Array], on_part: OnPart) -> None:
        """Call `on_part` for each part of a block of C before it is written, in the writer threads."""
        self._transfers.inspect(operation, columns, on_part)

    def stop(self) -> None:
        """Stop retrying reads, and wake the threads that wait for a retry."""
        self._transfers.stop()

    def close(self) -> None:
        """Join the threads and drop the host slots."""
        self._slots.close()
        self._transfers.close()
