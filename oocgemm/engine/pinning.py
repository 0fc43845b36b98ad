"""Pins operands in the caller's memory, part by part in a thread, so that a device copies directly from them.

Otherwise every block would first be copied to a pinned buffer, which can take longer than the multiplication.
Pinning resident pages takes one thread 0.02 s per GiB.

Unpinning waits for all work on the device. So operands are unpinned after the last operation of the run, but
before the run returns: CUDA would refuse later copies of the caller that cross the border of a pinned range.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from oocgemm.backends.base import Array, InPlace, Pinner
from oocgemm.planning.tiling import round_up
from oocgemm.stores.files import PAGE, resident
from oocgemm.system.threads import start

# Operands are pinned in parts of PART bytes. While the driver pins memory, no thread can submit work. So the
# first SINGLE_PARTS parts are pinned by one short call each. Later calls pin up to PARTS_PER_CALL parts,
# because a larger call pins more bytes per second.
PART = 16 << 20
SINGLE_PARTS, PARTS_PER_CALL = 32, 4
# The run waits until a block is pinned if the thread has to pin at most this many times the block's bytes
# first. Otherwise it copies the block to a pinned host slot, which takes about as long as pinning four times
# the block's bytes.
MAX_WAIT_RATIO = 4


class PinnedOperands:
    """The caller's arrays, which a thread pins part by part.

    A part is at most `PART` bytes of the arrays' memory. The parts that the run needs first are pinned first,
    the others in order of address.
    """

    def __init__(self, arrays: Sequence[Array], first: Iterable[Array], pinner: Pinner) -> None:
        """Start the thread.

        Args:
            arrays: the operands; they may share memory.
            first: the blocks that the run needs first, in order of use, as views of the arrays. Their parts
                are pinned before all others, except those of blocks with large gaps between the rows.
            pinner: pins and unpins memory.

        Raises:
            ExecutionError: the system refuses a thread.
        """
        self._pinner = pinner
        self._begins, self._ends = _parts(arrays)
        needed = dict.fromkeys(
            part
            for block in first
            if _spanned_bytes(block) <= MAX_WAIT_RATIO * block.nbytes
            for part in self._parts_of(block)
        )
        self._order = [*needed, *(part for part in range(len(self._begins)) if part not in needed)]
        self._turn = {part: turn for turn, part in enumerate(self._order)}
        # How many parts are pinned: the first ones of the list `_order`.
        self._done = 0
        # The start address of each pinned range, for `unpin`. One call of the driver pins one range.
        self._ranges: set[int] = set()
        self._progress = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._pin_all, name="oocgemm-pin")
        start(self._thread)

    def await_block(self, block: Array) -> InPlace | None:
        """Wait until the memory of a block is pinned, and return the block.

        Returns:
            The block as an `InPlace`. None, at once, if the wait would be too long (`MAX_WAIT_RATIO`). None
            also if pinning stops before the whole block is pinned.
        """
        parts = self._parts_of(block)
        turn = max(self._turn[part] for part in parts)
        with self._progress:
            if (turn + 1 - self._done) * PART > MAX_WAIT_RATIO * block.nbytes:
                return None
            self._progress.wait_for(lambda: self._done > turn or self._stopped)
            if self._done <= turn:
                return None
        begins = (self._begins[part] for part in parts[1:])
        return InPlace(block, [begin for begin in begins if begin in self._ranges])

    def _parts_of(self, block: Array) -> range:
        """Return the indices of the parts that overlap the address range of a block."""
        low, high = np.lib.array_utils.byte_bounds(block)
        return range(bisect_right(self._begins, low) - 1, bisect_right(self._begins, high - 1))

    def _pin_all(self) -> None:
        # If pinning fails, the run goes on: blocks that are not pinned pass through host slots.
        with suppress(Exception):
            for parts in self._calls():
                begin, size = self._begins[parts[0]], self._ends[parts[-1]] - self._begins[parts[0]]
                # Stop at pages that are not in memory. Pinning would allocate them, beyond the budget.
                if self._stopped or not resident(begin, size):
                    break
                self._pinner.pin(begin, size)
                self._ranges.add(begin)
                with self._progress:
                    self._done += len(parts)
                    self._progress.notify_all()
        self.stop()

    def _calls(self) -> Iterator[list[int]]:
        """Yield, for each call of the driver, the indices of the parts that the call pins.

        The parts of one call are adjacent in memory. Parts are pinned in the order of the list `_order`.
        """
        group: list[int] = []
        for turn, part in enumerate(self._order):
            limit = 1 if turn <= SINGLE_PARTS else PARTS_PER_CALL
            if group and (len(group) >= limit or self._ends[group[-1]] != self._begins[part]):
                yield group
                group = []
            group.append(part)
        yield group

    def stop(self) -> None:
        """Pin nothing more, and wake the threads that wait for a block."""
        with self._progress:
            self._stopped = True
            self._progress.notify_all()

    def release(self) -> None:
        """Unpin the arrays. Call it when no copy from or to them is in flight."""
        self.stop()
        self._thread.join()
        for begin in self._ranges:
            # After a failed launch, every CUDA call raises. Unpin the remaining ranges all the same.
            with suppress(Exception):
                self._pinner.unpin(begin)
        self._ranges.clear()


def _spanned_bytes(array: Array) -> int:
    """Return the size of an array's address range in bytes. Gaps between its rows are included."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low


def _parts(arrays: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Cut the memory of the arrays into parts of at most `PART` bytes, on page boundaries.

    Returns:
        The address where each part begins, and where each ends. Memory that arrays share appears once.
    """
    ranges: list[list[int]] = []
    bounds = sorted(map(np.lib.array_utils.byte_bounds, arrays))
    for low, high in [(low // PAGE * PAGE, round_up(high, PAGE)) for low, high in bounds]:
        if ranges and low <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], high)
        else:
            ranges.append([low, high])
    begins = [begin for low, high in ranges for begin in range(low, high, PART)]
    ends = [min(begin + PART, high) for low, high in ranges for begin in range(low, high, PART)]
    return begins, ends
