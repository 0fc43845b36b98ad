"""The host tier of a run: host slots, the threads that move blocks between stores and slots, and zero-copy
blocks."""

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
    """Moves blocks between stores and host memory for the executor, and tells it where each block is."""

    def __init__(
        self,
        plan: Plan,
        operands: Mapping[str, Matrix],
        pin: Callable[[Sequence[Array]], object] = lambda columns: None,
        pinner: Pinner | None = None,
    ) -> None:
        """Allocate the host slots and start the threads.

        Args:
            plan: the slots and the layouts of the operands.
            operands: the matrices A, B and C.
            pin: pins the memory of a slot. It is called by the thread that has faulted the pages in.
            pinner: pins operands in the caller's memory for zero-copy; None if the device needs no pinned
                memory.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._plan = plan
        self._pin = pin
        self._slots = HostSlots(plan, pin)
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
        """The error of each read that was retried."""
        return self._transfers.retried

    def is_in_place(self, slot: Slot) -> bool:
        """Return whether a host slot stands for a block in the caller's memory."""
        return self._zero_copy.get(slot) is not None

    def columns(self, slot: Slot, operation: Operation) -> list[Array]:
        """Return the part of a host slot that an operation's block fills, as stored: groups of columns, each
        contiguous."""
        return self._slots.columns(slot, operation)

    def checksum_bytes(self, slot: Slot) -> Array:
        """Return the memory behind the strip in a C slot: the checksums that a Download copies with the
        strip."""
        return self._slots.checksum_bytes(slot)

    def groups(self, operation: Operation, columns: Sequence[Array]) -> Iterator[tuple[Range, Range, Array]]:
        """Yield each group of columns of a block with its ranges of rows and columns in the stored
        operand."""
        return located(self._plan, operation, columns)

    def upload_source(self, operation: Operation) -> Sequence[Array]:
        """Return the host memory that an Upload copies from: its slot, or the block in place."""
        slot = operation.reads[0].slot
        return self._zero_copy.get(slot) or self.columns(slot, operation)

    def prepare_download(self, operation: Operation) -> Sequence[Array]:
        """Get the host memory ready that a Download copies to, and return it: its slot, prefaulted, or the
        block in place."""
        slot = operation.writes[0].slot
        if self._zero_copy.assign(operation):
            in_place = self._zero_copy.get(slot)
            assert in_place is not None
            return in_place
        self._slots.await_prefault(slot)
        return self.columns(slot, operation)

    def await_prefault(self, slot: Slot) -> None:
        """Wait until a slot has been prefaulted, if the device writes to it first."""
        self._slots.await_prefault(slot)

    def transfer(
        self, operation: Operation, columns: Sequence[Array], on_part: OnPart | None = None
    ) -> Sequence[Array]:
        """Run a Read (store to slot) or a Write (slot to store) in the reader or writer threads.

        Args:
            operation: the Read or Write.
            columns: the slot's memory, as groups of columns.
            on_part: called for each part of a Read by the thread that has read it. Without it, a Read may be
                zero-copy.

        Returns:
            Where the block is now: `columns`, or the block in the caller's memory.

        Raises:
            ExecutionError: a part cannot be read or written; the message names the store and the range.
        """
        if operation.kind is not Kind.READ:
            self._transfers.write(operation, columns)
            return columns
        slot = operation.writes[0].slot
        # Prefaulting C competes with the first reads, so it starts when a slot is read into for the second
        # time.
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
        """Call `on_part` for each part of a strip that is about to be written, in the writer threads."""
        self._transfers.inspect(operation, columns, on_part)

    def stop(self) -> None:
        """End all waiting: for retries of reads, and for blocks that are not pinned yet."""
        self._transfers.stop()
        self._zero_copy.stop()

    def close(self) -> None:
        """Join the threads and drop the slots. Operands stay pinned until `release`."""
        self._slots.close()
        self._transfers.close()
        self._zero_copy.clear()

    def release(self) -> None:
        """Unpin the operands. No copy from or to them may be in flight."""
        self._zero_copy.release()
