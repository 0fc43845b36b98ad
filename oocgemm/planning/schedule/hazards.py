"""Derive every wait of a schedule from the parts of buffers that operations access.

A region is a range of elements in a slot (buffer). If two operations access overlapping regions, the later
one in program order waits for the earlier one in three cases:

- it reads elements that the earlier one writes (read after write, RAW);
- it overwrites elements that the earlier one reads (write after read, WAR);
- it overwrites elements that the earlier one writes (write after write, WAW).

No wait is written by hand anywhere in this project.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from threading import Lock
from typing import Any, Generic, TypeVar

from oocgemm.planning.schedule.operation import Operation, Slot

T = TypeVar("T")

# Streams whose operations run one after another in program order, so that an operation ends only after all
# earlier ones of its stream. Reads and Writes may run in any order.
IN_ORDER = frozenset({"h2d", "h2d-c", "peer", "prepare", "compute", "d2h"})


# An access to elements [start, stop) of a slot: start, stop, the token of the operation, its device and
# stream, and whether it writes.
_Access = tuple[int, int, T, tuple[int, str], bool]


class HazardTracker(Generic[T]):
    """Derive waits from operations that are admitted in program order.

    A token of any type T stands for an operation, for example a completion event. The tracker drops accesses
    that no later operation needs to wait for, so that its memory is proportional to the number of slots.
    """

    def __init__(self) -> None:
        self._accesses: defaultdict[Slot, list[_Access[T]]] = defaultdict(list)

    def admit(self, operation: Operation, token: T) -> list[T]:
        """Return the tokens of the earlier operations that this one, from now on `token`, must wait for."""
        waits: list[T] = []
        name = operation.stream
        in_order = name in IN_ORDER
        # Streams of the same name on two devices are different streams: an Upload to one device may end after
        # a later Upload from the same host slot to another device.
        stream = operation.device, name
        # No helper functions in the loops: they run for every operation and every access of the run.
        for slot, start, stop in operation.reads:
            kept = []
            for access in self._accesses[slot]:
                begin, end, other, its_stream, writes = access
                if writes:
                    if begin < stop and start < end:
                        waits.append(other)
                    kept.append(access)
                # Drop an earlier read of the same in-order stream if this read covers all its elements. The
                # earlier read ends first, so that later writes need only wait for this read.
                elif not in_order or its_stream != stream or begin < start or stop < end:
                    kept.append(access)
            kept.append((start, stop, token, stream, False))
            self._accesses[slot] = kept
        for slot, start, stop in operation.writes:
            kept = []
            for access in self._accesses[slot]:
                begin, end, other, _, _ = access
                if begin < stop and start < end and other is not token and other not in waits:
                    waits.append(other)
                # Drop an earlier access if this operation overwrites all its elements: later operations on
                # these elements wait for this operation, which waits for the earlier one.
                if begin < start or stop < end:
                    kept.append(access)
            kept.append((start, stop, token, stream, True))
            self._accesses[slot] = kept
        return waits


class Program(Sequence[tuple[Operation, list[int]]]):
    """Operations, each with the indices of the operations that it waits for.

    These waits are derived when they are first needed. So a run starts its first operations before the waits
    of the last ones are known. Several threads may use a program at the same time.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        # If an exception interrupts `_derive`, its next call iterates over the operations from the beginning.
        self._operations = operations
        self._left: Iterator[Operation] | None = None
        self._tracker = HazardTracker[int]()
        self._known: list[tuple[Operation, list[int]]] = []
        self._lock = Lock()

    def __reduce__(self) -> tuple[type["Program"], tuple[list[Operation]]]:
        return Program, ([operation for operation, _ in self],)  # neither a lock nor an iterator is pickled

    def _derive(self, stop: int | None = None) -> None:
        """Derive the waits of the operations before index `stop`, or of all operations if it is None."""
        with self._lock:
            left, self._left = self._left, None
            if left is None:
                left, self._tracker = iter(self._operations), HazardTracker()
                for i, operation in enumerate(islice(left, len(self._known))):
                    self._tracker.admit(operation, i)
            more = None if stop is None else max(0, stop - len(self._known))
            for operation in islice(left, more):
                self._known.append((operation, self._tracker.admit(operation, len(self._known))))
            self._left = left

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice) or not 0 <= i < len(self._known):
            self._derive()
        return self._known[i]

    def __len__(self) -> int:
        self._derive()
        return len(self._known)

    def __iter__(self) -> Iterator[tuple[Operation, list[int]]]:
        for i in count():
            if i == len(self._known):
                self._derive(i + 1)
                if i == len(self._known):
                    return
            yield self._known[i]
