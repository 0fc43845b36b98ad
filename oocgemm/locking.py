"""Operands in memory that a device copies from where they lie, locked part by part by a thread.

To copy them into locked slots first takes the memory of the host three times, and beside a fast GPU longer than the
multiplication. To lock pages that are in use takes one thread 0.02 s a GiB, with no harm to what the device is at. To unlock
them takes as long, waits for all that the device is at and holds up whoever has an order for it: they stay locked for as long as
the array that holds them lives, and the next product of it finds them so.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain

import numpy as np

from oocgemm.backends.base import Array, InPlace, Locks
from oocgemm.plan.tiling import round_up
from oocgemm.stores.files import PAGE, resident
from oocgemm.threads import start

# What is locked at a time: as long as that takes, the device takes no orders. More of it is faster, once the first steps have
# theirs.
PART = 16 << 20
ONE_BY_ONE, TOGETHER = 32, 4
# A panel is waited for if no more than so many times its own bytes are to be locked before: it would be copied as soon.
WORTH_WAITING = 4
NEVER = 1 << 62


class Memory:
    """What an array holds of memory, whole pages in parts that are numbered, and what of it is locked."""

    def __init__(self, holder: Array) -> None:
        low, high = np.lib.array_utils.byte_bounds(holder)
        self.begin, self.end = low // PAGE * PAGE, round_up(high, PAGE)
        self.locked: set[int] = set()
        self._ranges: dict[
            int, Callable[[int], object]
        ] = {}  # how to unlock what was locked at once, by where it begins
        self._at = threading.Lock()

    def lock(self, parts: Sequence[int], locks: Locks) -> None:
        """Lock parts that lie side by side. Raises what the system refuses, and `OSError` for memory that was never written to
        and is none yet."""
        with self._at:  # another run may be locking the same
            missing = [part for part in parts if part not in self.locked]
            for group in [missing] if len(missing) == len(parts) else [[part] for part in missing]:
                begin = self.begin + group[0] * PART
                size = min(self.begin + (group[-1] + 1) * PART, self.end) - begin
                if not resident(begin, size):
                    raise OSError("nothing is there")
                locks.lock(begin, size)
                self._ranges[begin] = locks.unlock
                self.locked.update(group)

    def borders(self, parts: Sequence[int]) -> list[int]:
        """Where in these one locked range ends and the next begins."""
        begins = (self.begin + part * PART for part in parts[1:])
        return [begin for begin in begins if begin in self._ranges]

    def unlock(self) -> None:
        """The device must be at nothing that is to be copied from here."""
        with self._at:
            for begin, unlock in self._ranges.items():
                with suppress(Exception):  # after a failed launch every call fails
                    unlock(begin)
            self._ranges.clear()
            self.locked.clear()


# A part of some memory.
Part = tuple[Memory, int]

# Of arrays that live, by their ids.
_memories: dict[int, Memory] = {}
_finding = threading.Lock()


def parts_of(block: Array) -> tuple[Memory, range]:
    """The memory that a block is of, which is unlocked when the array goes that holds it, and the parts that it lies in."""
    holder = block
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    with _finding:
        if id(holder) not in _memories:
            _memories[id(holder)] = Memory(holder)
            weakref.finalize(holder, _let_go, id(holder)).atexit = False  # the system does it then
        memory = _memories[id(holder)]
    low, high = np.lib.array_utils.byte_bounds(block)
    return memory, range((low - memory.begin) // PART, (high - 1 - memory.begin) // PART + 1)


def _let_go(holder: int) -> None:
    _memories.pop(holder).unlock()


def unlock() -> None:
    """Unlock all that is locked of arrays that live. No run may be under way."""
    for memory in list(_memories.values()):
        memory.unlock()


class Locked:
    """Arrays, of which ever more is locked: what is needed first, then the rest as it lies."""

    def __init__(self, arrays: Sequence[Array], first: Iterable[Array], locks: Locks) -> None:
        """`first` are blocks of these arrays, of which those come first that are no small part of what is to be locked for
        them. Raises `ExecutionError` if no thread can be started."""
        self._locks = locks
        self._turn: dict[Part, int] = {}  # of what is to be locked, in this order
        self._done = -1  # of these; less than 0 until the order is known
        self._more = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._lock, args=(arrays, first), name="oocgemm-lock")
        start(self._thread)

    def find(self, block: Array, *, waits: bool = True) -> InPlace | None:
        """A block of the arrays for a device to copy, once it is locked; None if that is not soon or not at all, or not yet for
        one who does not wait."""
        memory, parts = parts_of(block)
        with self._more:
            if waits:
                self._more.wait_for(lambda: self._done >= 0 or self._stopped)
            missing = [part for part in parts if part not in memory.locked]
            if missing:
                turn = max(self._turn.get((memory, part), NEVER) for part in missing)
                if not waits or (turn + 1 - self._done) * PART > WORTH_WAITING * block.nbytes:
                    return None
                self._more.wait_for(lambda: self._done > turn or self._stopped)
                if self._done <= turn:
                    return None
        return InPlace(block, memory.borders(parts))

    def _lock(self, arrays: Sequence[Array], first: Iterable[Array]) -> None:
        with suppress(Exception):  # what the system refuses is copied
            left = dict.fromkeys(part for part in _each(arrays) if part[1] not in part[0].locked)
            soon = (block for block in first if _spanned(block) <= WORTH_WAITING * block.nbytes)
            needed = filter(left.__contains__, _each(soon)) if left else ()
            order = list(dict.fromkeys(chain(needed, left)))
            with self._more:
                self._turn, self._done = {which: turn for turn, which in enumerate(order)}, 0
                self._more.notify_all()
            for memory, group in _at_once(order):
                if self._stopped:
                    break
                memory.lock(group, self._locks)
                with self._more:
                    self._done += len(group)
                    self._more.notify_all()
        self.stop()

    def stop(self) -> None:
        """Lock nothing more, and wait for nothing more to be locked."""
        with self._more:
            self._stopped = True
            self._more.notify_all()

    def close(self) -> None:
        """Stop, and join the thread. What is locked stays so."""
        self.stop()
        self._thread.join()


def is_there(array: Array) -> bool:
    """Whether the system has found memory for an array, going by some of it."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return resident(low // PAGE * PAGE, high - low)


def _each(blocks: Iterable[Array]) -> Iterator[Part]:
    """The parts that blocks lie in."""
    for block in blocks:
        memory, parts = parts_of(block)
        yield from ((memory, part) for part in parts)


def _at_once(order: Sequence[Part]) -> Iterator[tuple[Memory, list[int]]]:
    """The parts in order, after the first few several that lie side by side at a time."""
    holder, group = None, list[int]()
    for turn, (memory, part) in enumerate(order):
        most = 1 if turn <= ONE_BY_ONE else TOGETHER
        if holder is not None and (len(group) >= most or (holder, group[-1] + 1) != (memory, part)):
            yield holder, group
            group = []
        holder = memory
        group.append(part)
    if holder is not None:
        yield holder, group


def _spanned(array: Array) -> int:
    """Bytes of memory from the first element to the last."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low
