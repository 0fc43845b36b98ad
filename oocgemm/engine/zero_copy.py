"""Zero-copy blocks: panels and strips that the device copies from or to the caller's memory, without a host
slot."""

from collections.abc import Mapping
from itertools import takewhile

from oocgemm.backends.base import InPlace, Pinner
from oocgemm.engine.blocks import stored_block
from oocgemm.engine.pinning import PinnedOperands
from oocgemm.planning import Kind, Operation, Plan, Slot
from oocgemm.stores import Array, Matrix, memory


class ZeroCopy:
    """Which host slots currently stand for a block in the caller's memory.

    The plan decides for which blocks zero-copy pays. An operand that the caller has pinned is used at once.
    Other operands are pinned incrementally by a thread, and a block is copied through its slot if it is not
    pinned soon enough.
    """

    def __init__(self, plan: Plan, operands: Mapping[str, Matrix], pinner: Pinner | None) -> None:
        """Start to pin the operands that the plan wants pinned, those of the first tile's panels first.

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
        """Return the view of an operand in memory that an operation's block covers, as stored."""
        rows, cols = stored_block(self._plan, operation)
        return memory(self._operands[operation.operand])[slice(*rows), slice(*cols)]

    def assign(self, operation: Operation) -> bool:
        """Make the slot that a Read or a Download writes stand for its block in place, if possible; return
        whether it does.

        May wait until the block is pinned.
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
        """Return the block that a slot stands for; None if the slot has its block in its own memory."""
        return self._blocks.get(slot)

    def stop(self) -> None:
        """Pin nothing more, and wake the threads that wait for a block."""
        if self._pinned is not None:
            self._pinned.stop()

    def clear(self) -> None:
        """Drop all views of the caller's memory."""
        self._blocks.clear()

    def release(self) -> None:
        """Unpin the operands. No copy from or to them may be in flight."""
        if self._pinned is not None:
            self._pinned.release()
