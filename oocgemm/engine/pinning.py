"""Operands in memory that a device copies from where they lie, locked part by part by a thread.

To copy them into locked slots first takes the memory of the host three times, and beside a fast GPU longer than the
multiplication. To lock pages that are in use takes one thread 0.02 s a GiB, with no harm to what the device is at. To unlock
them takes as long, waits for all that the device is at and holds up whoever has an order for it: that is left until all is
done. It cannot be left until later, nor to a thread: CUDA refuses every copy, whoever wants it, of more than one locked range
and of what is locked in part.
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

# What is locked at a time: as long as that takes, the device takes no orders. More of it is faster, once the first steps have
# theirs.
PART = 16 << 20
ONE_BY_ONE, TOGETHER = 32, 4
# A panel is waited for if no more than so many times its own bytes are to be locked before: it would be copied as soon.
WORTH_WAITING = 4


class PinnedOperands:
    """Arrays, of which ever more is locked: what is needed first, then the rest as it lies."""

    def __init__(self, arrays: Sequence[Array], first: Iterable[Array], pinner: Pinner) -> None:
        """`first` are blocks of these arrays, of which those come first that are no small part of what is to be locked for
        them. Raises `ExecutionError` if no thread can be started."""
        self._locks = pinner
        self._begins, self._ends = _parts(arrays)
        needed = dict.fromkeys(
            part
            for block in first
            if _spanned(block) <= WORTH_WAITING * block.nbytes
            for part in self._of(block)
        )
        self._order = [*needed, *(part for part in range(len(self._begins)) if part not in needed)]
        self._turn = {part: turn for turn, part in enumerate(self._order)}
        self._done = 0  # parts, in that order
        self._ranges: set[int] = set()  # where those begin that were locked at once
        self._more = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._lock, name="oocgemm-lock")
        start(self._thread)

    def find(self, block: Array) -> InPlace | None:
        """A block of the arrays for a device to copy, once it is locked; None if that is not soon or not at all."""
        parts = self._of(block)
        turn = max(self._turn[part] for part in parts)
        with self._more:
            if (turn + 1 - self._done) * PART > WORTH_WAITING * block.nbytes:
                return None
            self._more.wait_for(lambda: self._done > turn or self._stopped)
            if self._done <= turn:
                return None
        begins = (self._begins[part] for part in parts[1:])
        return InPlace(block, [begin for begin in begins if begin in self._ranges])

    def _of(self, block: Array) -> range:
        """The parts that hold a block."""
        low, high = np.lib.array_utils.byte_bounds(block)
        return range(bisect_right(self._begins, low) - 1, bisect_right(self._begins, high - 1))

    def _lock(self) -> None:
        with suppress(Exception):  # what the system refuses is copied
            for parts in self._at_once():
                begin, size = self._begins[parts[0]], self._ends[parts[-1]] - self._begins[parts[0]]
                # Memory that was never written to is none yet.
                if self._stopped or not resident(begin, size):
                    break
                self._locks.pin(begin, size)
                self._ranges.add(begin)
                with self._more:
                    self._done += len(parts)
                    self._more.notify_all()
        self.stop()

    def _at_once(self) -> Iterator[list[int]]:
        """The parts in order, after the first few several that lie side by side at a time."""
        group: list[int] = []
        for turn, part in enumerate(self._order):
            most = 1 if turn <= ONE_BY_ONE else TOGETHER
            if group and (len(group) >= most or self._ends[group[-1]] != self._begins[part]):
                yield group
                group = []
            group.append(part)
        yield group

    def stop(self) -> None:
        """Lock nothing more, and wait for nothing more to be locked."""
        with self._more:
            self._stopped = True
            self._more.notify_all()

    def release(self) -> None:
        """Unlock everything. The device must be at nothing that is to be copied from here."""
        self.stop()
        self._thread.join()
        for begin in self._ranges:
            with suppress(Exception):  # after a failed launch every call fails
                self._locks.unpin(begin)
        self._ranges.clear()


def _spanned(array: Array) -> int:
    """Bytes of memory from the first element to the last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low


def _parts(arrays: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Where the parts of the memory of arrays, which may share some, begin and end."""
    spans: list[list[int]] = []
    bounds = sorted(map(np.lib.array_utils.byte_bounds, arrays))
    for low, high in [(low // PAGE * PAGE, round_up(high, PAGE)) for low, high in bounds]:
        if spans and low <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], high)
        else:
            spans.append([low, high])
    begins = [begin for low, high in spans for begin in range(low, high, PART)]
    ends = [min(begin + PART, high) for low, high in spans for begin in range(low, high, PART)]
    return begins, ends
