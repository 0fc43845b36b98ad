"""The slots (buffers) of a run, operations on regions of slots, and the waits that follow from the regions.

A region is a range of elements in a slot. If two operations access overlapping regions, the later one in
program order waits for the earlier one in three cases:

- it reads elements that the earlier one writes (read after write, RAW);
- it overwrites elements that the earlier one reads (write after read, WAR);
- it overwrites elements that the earlier one writes (write after write, WAW).

No wait is written by hand anywhere in this project.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from itertools import count, islice
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from oocgemm.planning.tiling import Range, Tile
from oocgemm.values import dataclass


class Tier(StrEnum):
    """The memory that a slot is in."""

    HOST = "host"
    DEVICE = "device"

    __hash__ = str.__hash__  # the hash of enums is slow, and slots are looked up for every operation


class Slot(NamedTuple):
    """One buffer, on the device or on the host. Its `operand` says what it stores:

    - A, B: a panel;
    - C: on the device an accumulator, in which a tile of C is summed; on the host a strip (some rows) of a
      tile;
    - D: on the device, a strip to which alpha and beta have been applied;
    - P: on the device, the result of a Prepare of a step's panels: residues, or transformed panels;
    - S: on the device, the checksums of a tile's strips. They have no memory of their own: they are stored
      behind the tile, in the C slot with the same index.

    If a run uses several devices, `device` is the position of the slot's device in their list. Host slots for
    panels are shared by all devices: their `device` is 0. Every device has host slots of its own for strips.
    """

    tier: Tier
    operand: str
    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    device: int = 0

    def __str__(self) -> str:
        return f"{self.tier}:{self.operand}{self.index}" + (
            f" of device {self.device}" if self.device else ""
        )


@cache
def slot_of(tier: Tier, operand: str, index: int, device: int = 0) -> Slot:
    """Return the same `Slot` object for equal arguments. Dicts look identical objects up faster."""
    return Slot(tier, operand, index, device)


class Region(NamedTuple):
    """Elements [start, stop) of a slot (a buffer), or strips [start, stop) of a slot for checksums.

    Two operations that access overlapping regions may have to wait for one another. Regions count elements
    instead of rows, because tiles of different widths use the same slot.
    """

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Numbers of slots (buffers) of each kind, and how tiles of C drain (are downloaded and written).

    If a run uses several devices, all numbers are per device, except that all devices share the host slots
    for panels.

    - `a`, `b`, `c`: device slots for panels of op(A), panels of op(B) and accumulators (tiles of C).
    - `host_a`, `host_b`: host slots for panels. `host_c`: host slots for strips of C. An operand without host
      slots is in host memory, and the device copies from or to its array (`streams`).
      For a Gram matrix, `b` and `host_b` are 0: the slots for panels of op(A) are used in both roles.
    - `finish`: device slots for finished strips (D). `planes`: device slots for prepared panels (P).
    - `unified`: device and host share one memory, so that there are no host slots.
    - `strip`: a tile drains in strips of this many rows.
    - `drain`: the last `drain` steps of the last tile run strip by strip, so that its first strips drain
      while later ones are multiplied.
    - `turn`: with one accumulator, `turn` steps run strip by strip at the end of every tile but the last, and
      as many at the start of every tile but the first. 0 means half of `drain`, rounded up.
    """

    a: int = 2
    b: int = 2
    c: int = 1
    host_a: int = 2
    host_b: int = 2
    host_c: int = 2
    finish: int = 0
    strip: int = 1
    drain: int = 1
    planes: int = 0
    unified: bool = False
    turn: int = 0

    @property
    def last_steps(self) -> int:
        """Number of steps of the last tile that run strip by strip (some rows of the tile at a time).

        This is the number that `drain` requests. It is limited by `a` and by `b`, since the device must store
        the panels of all these steps at the same time.
        """
        return min(self.drain, min(self.a, self.b) if self.b else max(1, self.a // 2))

    @property
    def turn_steps(self) -> int:
        """Number of steps that run strip by strip at the end of a tile, and at the start of the next one.

        A strip is some rows of a tile. While one strip is multiplied, the strip before it is downloaded and
        written. The last tile ends with `last_steps` such steps instead.

        With two accumulators, the number is 0: the next tile is computed in the other accumulator, so that
        the whole download overlaps it.
        """
        return min(self.turn or -(-self.last_steps // 2), self.last_steps) if self.c == 1 else 0

    def streams(self, operand: str) -> bool:
        """Whether blocks of an operand go between its array and the device without host slots."""
        return not self.unified and self.count(Tier.HOST, operand) == 0

    def count(self, tier: Tier, operand: str) -> int:
        """Return the number of slots (buffers) of an operand on a tier."""
        if tier is Tier.HOST:
            return {"A": self.host_a, "B": self.host_b, "C": self.host_c}.get(operand, 0)
        counts = {"A": self.a, "B": self.b, "C": self.c, "D": self.finish, "P": self.planes, "S": self.c}
        return counts[operand]


class Kind(StrEnum):
    """What an operation does: copy from or to storage, copy from or to the device, or compute."""

    READ = "read"
    UPLOAD = "upload"
    PREPARE = "prepare"
    MULTIPLY = "multiply"
    FINISH = "finish"
    DOWNLOAD = "download"
    WRITE = "write"

    __hash__ = str.__hash__


class Lane(StrEnum):
    """Where an operation runs. Reports have one row per lane."""

    READ = "read"
    DECODE = "decode"
    H2D = "h2d"
    PREPARE = "prepare"
    COMPUTE = "compute"
    D2H = "d2h"
    ENCODE = "encode"
    WRITE = "write"

    __hash__ = str.__hash__


LANES = {
    Kind.READ: Lane.READ,
    Kind.UPLOAD: Lane.H2D,
    Kind.PREPARE: Lane.PREPARE,
    Kind.MULTIPLY: Lane.COMPUTE,
    Kind.FINISH: Lane.COMPUTE,
    Kind.DOWNLOAD: Lane.D2H,
    Kind.WRITE: Lane.WRITE,
}


# Replacements of lanes in `LANES`, for Reads that decode chunks and Writes that encode chunks.
_CODED = {Lane.READ: Lane.DECODE, Lane.WRITE: Lane.ENCODE}


@cache
def lane_and_stream(kind: Kind, operand: str, coded: bool, turned: bool, peer: bool) -> tuple[Lane, str]:
    """Return where an operation runs, and the name of the queue that it is issued to.

    Most queues have the name of the lane. Loads of C have queues of their own, such as "read-c", so that they
    do not queue behind loads of A and B. Both Downloads of a strip of a whole Gram matrix read the same
    elements, and may end in any order. So the second Download has a queue of its own. Copies from other
    devices also have their own queue, because they may have to wait for those devices.
    """
    lane = LANES[kind]
    lane = _CODED.get(lane, lane) if coded else lane
    if peer:
        return lane, "peer"
    if turned:
        return lane, "d2h-turned"
    return lane, f"{lane.value}-c" if operand == "C" and kind in (Kind.READ, Kind.UPLOAD) else lane.value


# Kinds of operations on a store.
STORE_KINDS = (Kind.READ, Kind.WRITE)
# The ranges of rows and columns of a block.
Block = tuple[Range, Range]


class Operation(NamedTuple):
    """One copy or one computation.

    - `kind`, `operand`: what the operation does, and with which operand.
    - `tile`, `step`: the tile of C and the step along k that it belongs to.
    - `reads`, `writes`: the regions of slots (buffers) that it reads and writes.
    - `m`, `n`, `k`: ranges of indices of the product. A copy of a panel of op(A) has m and k, one of op(B)
      has k and n, and one of C has m and n. A Prepare and a Multiply have all three.
    - `bytes`: bytes that it copies. `flops`: real floating-point operations.
    - `first`: it is the first Multiply of its tile, which applies beta.
    - `coded`: it is a Read that decodes or a Write that encodes.
    - `device`: the device of its tile, as a position in the list of the run's devices.
    - `turned`: it is a Download of the conjugate transpose of a strip. `m` and `n` are where C stores it.
    - `peer`: it is an Upload from a slot of another device.
    - `lane`, `stream`: where it runs, and the queue that it is issued to (`lane_and_stream`).
    - `stored`: the block that it copies, as ranges of rows and columns of the stored operand.
    - `whole`: the rows and the columns of C that the panels of a Prepare or a Multiply have.
    - `parts`: the number of Writes that its tile has.
    """

    kind: Kind
    operand: str
    tile: Tile
    step: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    m: Range = (0, 0)
    n: Range = (0, 0)
    k: Range = (0, 0)
    bytes: int = 0
    flops: int = 0
    first: bool = False
    coded: bool = False
    device: int = 0
    turned: bool = False
    peer: bool = False
    lane: Lane = Lane.COMPUTE
    stream: str = Lane.COMPUTE.value
    stored: Block = ((0, 0), (0, 0))
    whole: Block = ((0, 0), (0, 0))
    parts: int = 0

    @property
    def strip(self) -> Range:
        """Range of rows of the strip of C that a Download copies."""
        return self.n if self.turned else self.m

    @property
    def block(self) -> Block:
        """Ranges of rows and columns that the operation accesses in op(A), op(B) or C."""
        if self.operand == "A":
            return self.m, self.k
        return (self.k if self.operand == "B" else self.m), self.n

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.block
        return f"{self.kind} {self.operand}[{r0}:{r1}, {c0}:{c1}] of tile {self.tile}, step {self.step}"


T = TypeVar("T")

# Streams whose operations run one after another in program order, so that an operation ends only after all
# earlier ones of its stream. Reads and Writes may run in any order.
IN_ORDER = frozenset({"h2d", "h2d-c", "peer", "prepare", "compute", "d2h"})


# An access to elements [start, stop) of a slot: start, stop, the token of the operation, its device and
# stream, and whether it writes.
_Access = tuple[int, int, T, tuple[int, str], bool]


class HazardTracker(Generic[T]):
    """Derive the waits of operations. The operations of a run must be passed in program order.

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
