"""Pins operands in the caller's memory, incrementally and in a thread, so that a device copies them without
host slots.

Copying an operand to pinned slots first crosses the host's memory bus three times; beside a fast GPU that
takes longer than the multiplication. Pinning resident pages takes one thread 0.02 s per GiB and does not
disturb work on the device. Unpinning takes as long, waits for all work on the device, and blocks every thread
that submits to it. So operands are unpinned when the run has ended. This cannot be left to a background
thread: CUDA refuses any copy, by any caller, that crosses pinned ranges or covers partly pinned memory.
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

# Bytes pinned by one call. The driver blocks submissions during the call. Larger calls are faster, so they
# are used once the panels of the first steps are pinned: the first SINGLE_PARTS calls pin one part each,
# later ones up to PARTS_PER_CALL.
PART = 16 << 20
SINGLE_PARTS, PARTS_PER_CALL = 32, 4
# A block is waited for if at most this multiple of its own bytes must be pinned first: copying it takes about
# as long.
MAX_WAIT_RATIO = 4


class PinnedOperands:
    """Arrays that a thread pins part by part: the parts needed first, then the rest in order of address."""

    def __init__(self, arrays: Sequence[Array], first: Iterable[Array], pinner: Pinner) -> None:
        """Start the thread.

        Args:
            arrays: the operands; they may share memory.
            first: blocks of them in order of use. A block is pinned early only if it fills a good part of the
                address range that it spans.
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
        self._done = 0  # number of parts pinned, in that order
        self._ranges: set[int] = set()  # addresses where pinned ranges begin, each pinned by one call
        self._progress = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._pin_all, name="oocgemm-pin")
        start(self._thread)

    def await_block(self, block: Array) -> InPlace | None:
        """Wait until a block is pinned and return it; None if it is not pinned soon enough or not at all."""
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
        """Return the numbers of the parts that a block spans."""
        low, high = np.lib.array_utils.byte_bounds(block)
        return range(bisect_right(self._begins, low) - 1, bisect_right(self._begins, high - 1))

    def _pin_all(self) -> None:
        with suppress(Exception):  # blocks that the system refuses to pin are copied through slots
            for parts in self._calls():
                begin, size = self._begins[parts[0]], self._ends[parts[-1]] - self._begins[parts[0]]
                # Pinning would allocate pages that were never written.
                if self._stopped or not resident(begin, size):
                    break
                self._pinner.pin(begin, size)
                self._ranges.add(begin)
                with self._progress:
                    self._done += len(parts)
                    self._progress.notify_all()
        self.stop()

    def _calls(self) -> Iterator[list[int]]:
        """Yield the parts in order, grouped into those that one call pins: adjacent ones."""
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
        """Unpin everything. No copy from or to this memory may be in flight."""
        self.stop()
        self._thread.join()
        for begin in self._ranges:
            with suppress(Exception):  # after a failed launch every CUDA call fails
                self._pinner.unpin(begin)
        self._ranges.clear()


def _spanned_bytes(array: Array) -> int:
    """Return the bytes of memory from the first element to the last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low


def _parts(arrays: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Return the addresses where the parts of the arrays' memory begin and end. Arrays may overlap."""
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
