"""Zero-copy blocks: blocks of A, B or C that the device copies directly from or to the caller's memory.

All other blocks pass through a host slot, a buffer in pinned host memory.
"""

from collections.abc import Mapping
from itertools import takewhile

from oocgemm.backends.base import InPlace, Pinner
from oocgemm.engine.blocks import stored_block
from oocgemm.engine.pinning import PinnedOperands
from oocgemm.planning import Kind, Operation, Plan, Slot
from oocgemm.stores import Array, Matrix, memory


class ZeroCopy:
    """Tracks which blocks the device copies from or to the caller's memory instead of their host slots.

    The plan decides which blocks may be zero-copy. A thread pins the operands that the caller has not pinned.
    The run waits until the block that it needs is pinned. If that would take longer than copying the block,
    the block passes through its host slot instead.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Matrix], pinner: Pinner | None) -> None:
        """Start to pin the operands that the plan chose to pin, beginning with the panels of the first tile.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._plan = plan
        self._operands = operands
        self._blocks: dict[Slot, InPlace] = {}
        self._pinned: PinnedOperands | None = None
        if pinner is None or not (to_pin := plan.operands_to_pin):
            return
        schedule = plan.schedule()
        first = (
            self.block(operation)
            for operation in takewhile(lambda operation: operation.tile == schedule.tiles[0], schedule)
            if operation.kind is Kind.READ and operation.operand in to_pin
        )
        arrays = [memory(operands[operand]) for operand in sorted(to_pin)]
        self._pinned = PinnedOperands(arrays, first, pinner)

    def block(self, operation: Operation) -> Array:
        """Return an operation's block as a view of the caller's array, in the orientation of that array."""
        rows, cols = stored_block(self._plan, operation)
        return memory(self._operands[operation.operand])[slice(*rows), slice(*cols)]

    def assign(self, operation: Operation) -> bool:
        """Decide whether the device copies the block of a Read or a Download from or to the caller's memory.

        May wait until the block is pinned.

        Returns:
            True if the device copies from or to the caller's memory; `get` then returns that memory. False
            if the block passes through its host slot.
        """
        slot = operation.writes[0].slot
        self._blocks.pop(slot, None)
        if not self._plan.is_zero_copy(operation):
            return False
        found = None
        if operation.operand not in self._plan.operands_to_pin:
            found = InPlace(self.block(operation), [])
        elif self._pinned is not None:
            found = self._pinned.await_block(self.block(operation))
        if found is None:
            return False
        self._blocks[slot] = found
        return True

    def get(self, slot: Slot) -> InPlace | None:
        """Return the view of the caller's memory that `assign` chose in place of a host slot.

        Returns None if the block passes through the slot.
        """
        return self._blocks.get(slot)

    def stop(self) -> None:
        """Pin nothing more, and wake the threads that wait for a block."""
        if self._pinned is not None:
            self._pinned.stop()

    def clear(self) -> None:
        """Drop all views of the caller's memory."""
        self._blocks.clear()

    def release(self) -> None:
        """Unpin the caller's memory. Call it when no copy from or to that memory is in flight."""
        if self._pinned is not None:
            self._pinned.release()
