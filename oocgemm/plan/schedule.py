"""The schedule: every copy and every multiplication of a run, and the buffers they use, as data.

A schedule is the *sequential* program of the run, in the order one would write it without any overlap::

    for each tile (i, j):
        [load C]                                       beta != 0
        for each step p:
            Read A(i,p) -> host slot    Upload A -> A0 or A1
            Read B(p,j) -> host slot    Upload B -> B0 or B1
            Multiply  C0 += A_p B_p
        for each strip of rows of C0:
            [Finish]  Download -> host slot  Write     Finish: accumulator wider than C

All overlap follows from two things: operations of different streams do not wait for one another, and the
waits that remain are derived from the regions each operation reads and writes (`oocgemm.plan.hazards`).
Nothing here says "wait". An executor, a simulator and a checker consume the same operations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from oocgemm.plan.problem import GemmProblem
from oocgemm.plan.replacement import NEVER, SlotCache, State
from oocgemm.plan.tiling import Span, Tile, TileGrid
from oocgemm.plan.traversal import NextUse, step_order


class Tier(StrEnum):
    """Where a slot is."""

    HOST = "host"
    DEVICE = "device"


class Kind(StrEnum):
    """What an operation does."""

    READ = "read"
    UPLOAD = "upload"
    PREPARE = "prepare"
    MULTIPLY = "multiply"
    FINISH = "finish"
    DOWNLOAD = "download"
    WRITE = "write"


class Lane(StrEnum):
    """Where an operation runs; the lanes of the report."""

    READ = "read"
    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    WRITE = "write"


LANES = {
    Kind.READ: Lane.READ,
    Kind.UPLOAD: Lane.H2D,
    Kind.MULTIPLY: Lane.COMPUTE,
    Kind.FINISH: Lane.COMPUTE,
    Kind.DOWNLOAD: Lane.D2H,
    Kind.WRITE: Lane.WRITE,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A buffer: A and B hold a panel, C a tile (device) or a strip of one (host), D a finished strip (device)."""

    tier: Tier
    operand: str
    index: int
    device: int = 0

    def __str__(self) -> str:
        return f"{self.tier}:{self.operand}{self.index}"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements [start, stop) of a slot: what hazards are derived on. Elements, not rows: tiles of different
    widths take turns in a slot, and a row of one is not where that row of the other was."""

    slot: Slot
    start: int
    stop: int

    def overlaps(self, other: "Region") -> bool:
        return self.slot == other.slot and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Operation:
    """One copy or one computation.

    `m`, `n`, `k` are the spans of the problem it concerns: m and k for a panel of op(A), k and n for one of
    op(B), m and n for a tile of C or a strip of it, all three for a Multiply. `first` marks the Multiply that
    begins a tile, the one that applies beta. `bytes` cross the lane's link, `flops` are done.
    """

    kind: Kind
    operand: str
    tile: Tile
    step: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    m: Span = (0, 0)
    n: Span = (0, 0)
    k: Span = (0, 0)
    bytes: int = 0
    flops: int = 0
    first: bool = False
    device: int = 0

    @property
    def lane(self) -> Lane:
        return LANES[self.kind]

    @property
    def stream(self) -> str:
        """The queue it is issued on: its lane, but C is loaded beside A and B, not between them."""
        loads_c = self.operand == "C" and self.kind in (Kind.READ, Kind.UPLOAD)
        return f"{self.lane}-c" if loads_c else self.lane.value

    @property
    def block(self) -> tuple[Span, Span]:
        """Rows and columns of the operand, in the orientation of op(X)."""
        return {"A": (self.m, self.k), "B": (self.k, self.n)}.get(self.operand, (self.m, self.n))

    def __str__(self) -> str:
        (r0, r1), (c0, c1) = self.block
        return f"{self.kind} {self.operand}[{r0}:{r1}, {c0}:{c1}] of tile {self.tile}, step {self.step}"


@dataclass(frozen=True, slots=True)
class Slots:
    """How many slots of each kind, and how many rows of a tile drain at a time.

    The five buffers of Liang et al. are c = 1, a = b = 2. No host slots at all mean that device and host memory are
    one: panels are read straight into the device's slots and tiles written straight from them.
    """

    a: int = 2
    b: int = 2
    c: int = 1
    host_a: int = 2
    host_b: int = 2
    host_c: int = 2
    finish: int = 0
    strip: int = 1

    @property
    def unified(self) -> bool:
        """Whether there is nothing to copy between host and device."""
        return self.host_a == self.host_b == self.host_c == 0

    def count(self, tier: Tier, operand: str) -> int:
        """Slots of an operand on a tier."""
        if tier is Tier.HOST:
            return {"A": self.host_a, "B": self.host_b, "C": self.host_c}.get(operand, 0)
        return {"A": self.a, "B": self.b, "C": self.c, "D": self.finish}[operand]


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a panel is for a step, and whether it had to be loaded on the way."""

    device_slot: int
    upload: bool
    host_slot: int
    read: bool


class _Placing:
    """Follows which panel is in which slot, tile by tile, on both tiers."""

    def __init__(self, tiles: Sequence[Tile], steps: int, slots: Slots) -> None:
        self._tiles = tiles
        self._steps = steps
        self._next_use = NextUse(tiles, steps)
        self._device = SlotCache(slots.a), SlotCache(slots.b)
        self._host = () if slots.unified else (SlotCache(slots.host_a), SlotCache(slots.host_b))

    def steps(self, position: int) -> Iterator[tuple[int, _Placed, _Placed]]:
        """The steps of tile number `position` in order, with the places of their panels; tiles in order too."""
        for step in step_order(self._tiles[position], self._steps):
            yield step, self._place(0, position, step), self._place(1, position, step)

    def _place(self, axis: int, position: int, step: int) -> _Placed:
        key = self._tiles[position][axis], step
        use = self._next_use(axis, position, step)
        slot, hit = self._device[axis].acquire(key, use)
        if hit:
            return _Placed(slot, upload=False, host_slot=0, read=False)
        if not self._host:
            return _Placed(slot, upload=True, host_slot=0, read=True)
        host_slot, on_host = self._host[axis].acquire(key, use)
        return _Placed(slot, upload=True, host_slot=host_slot, read=not on_host)

    def contents(self, position: int) -> tuple[State, ...]:
        """What the slots hold, seen from a tile."""
        tile, first = self._tiles[position], position * self._steps
        return tuple(
            cache.state(tile[axis], first)
            for pair in (self._device, self._host)
            for axis, cache in enumerate(pair)
        )

    def state(self, position: int) -> object:
        """All that decides which panels tile number `position` loads."""
        forwards = step_order(self._tiles[position], self._steps).step > 0
        first = position * self._steps
        later = (self._next_use(axis, position, 0) for axis in (0, 1))
        return self.contents(position), forwards, *(use if use == NEVER else use - first for use in later)

    def restore(self, contents: tuple[State, ...], position: int) -> None:
        """Put the slots into a state that was seen from another tile."""
        tile, first = self._tiles[position], position * self._steps
        states = iter(contents)
        for pair in (self._device, self._host):
            for axis, cache in enumerate(pair):
                cache.restore(next(states), tile[axis], first)


@dataclass(frozen=True)
class Schedule:
    """The operations of a run over `tiles` in that order: re-iterable, made as it is read, in memory
    proportional to slots and tiles, never to steps."""

    problem: GemmProblem
    grid: TileGrid
    tiles: Sequence[Tile]
    slots: Slots

    def __iter__(self) -> Iterator[Operation]:
        strips_done = 0
        placing = _Placing(self.tiles, self.grid.steps, self.slots)
        for position, tile in enumerate(self.tiles):
            strips = list(self._strips(tile))
            c_slot = Slot(Tier.DEVICE, "C", position % self.slots.c)
            loads_first = self.problem.reads_c and not self.problem.finishes
            if loads_first:
                for number, rows in enumerate(strips, strips_done):
                    yield from self._load_c(tile, rows, number, c_slot, whole_tile=True)
            for order, (step, a, b) in enumerate(placing.steps(position)):
                yield from self._load_panel("A", tile, step, a)
                yield from self._load_panel("B", tile, step, b)
                yield self._multiply(tile, step, a, b, c_slot, first=order == 0)
            for number, rows in enumerate(strips, strips_done):
                yield from self._drain(tile, rows, number, c_slot)
            strips_done += len(strips)

    def traffic(self) -> dict[str, int]:
        """Exact bytes that cross each link over the whole schedule: read, h2d, d2h, write.

        Counts what `__iter__` would yield, without making the operations. Tiles that find the slots in the same
        state, seen from where they are, load the same panels: each state is walked through once.
        """
        sizes = self.problem.itemsizes
        total = dict.fromkeys(("read", "h2d", "d2h", "write"), 0)
        depths = [k1 - k0 for k0, k1 in (self.grid.depth(p) for p in range(self.grid.steps))]
        placing = _Placing(self.tiles, self.grid.steps, self.slots)
        known: dict[object, tuple[tuple[int, ...], tuple[State, ...]]] = {}
        for position, tile in enumerate(self.tiles):
            before = placing.state(position)
            if before in known:
                loads, after = known[before]
                placing.restore(after, position)
            else:
                panels = list(placing.steps(position))
                loads = (
                    sum(depths[step] for step, a, _ in panels if a.upload),
                    sum(depths[step] for step, a, _ in panels if a.read),
                    sum(depths[step] for step, _, b in panels if b.upload),
                    sum(depths[step] for step, _, b in panels if b.read),
                )
                known[before] = loads, placing.contents(position)
            a_up, a_read, b_up, b_read = loads
            m, n = _length(self.grid.rows(tile[0])), _length(self.grid.cols(tile[1]))
            total["h2d"] += m * a_up * sizes["A"] + n * b_up * sizes["B"]
            total["read"] += m * a_read * sizes["A"] + n * b_read * sizes["B"]
            c_bytes = m * n * sizes["C"]
            for lane in ("read", "h2d") if self.problem.reads_c else ():
                total[lane] += c_bytes
            total["d2h"] += c_bytes
            total["write"] += c_bytes
        if self.slots.unified:
            total["h2d"] = total["d2h"] = 0
        return total

    def _strips(self, tile: Tile) -> Iterator[Span]:
        m0, m1 = self.grid.rows(tile[0])
        for start in range(m0, m1, self.slots.strip):
            yield start, min(start + self.slots.strip, m1)

    def _load_panel(self, operand: str, tile: Tile, step: int, placed: _Placed) -> Iterator[Operation]:
        k = self.grid.depth(step)
        if not placed.upload or k[0] == k[1]:
            return
        nothing = (0, 0)
        m = self.grid.rows(tile[0]) if operand == "A" else nothing
        n = self.grid.cols(tile[1]) if operand == "B" else nothing
        elements = _length(k) * _length(m if operand == "A" else n)
        size = elements * self.problem.itemsizes[operand]
        device = Region(Slot(Tier.DEVICE, operand, placed.device_slot), 0, elements)
        if self.slots.unified:
            yield Operation(Kind.READ, operand, tile, step, (), (device,), m, n, k, size)
            return
        host = Region(Slot(Tier.HOST, operand, placed.host_slot), 0, elements)
        if placed.read:
            yield Operation(Kind.READ, operand, tile, step, (), (host,), m, n, k, size)
        yield Operation(Kind.UPLOAD, operand, tile, step, (host,), (device,), m, n, k, size)

    def _multiply(
        self, tile: Tile, step: int, a: _Placed, b: _Placed, c_slot: Slot, *, first: bool
    ) -> Operation:
        m, n, k = self.grid.rows(tile[0]), self.grid.cols(tile[1]), self.grid.depth(step)
        c = Region(c_slot, 0, _length(m) * _length(n))
        keeps_old = not first or (self.problem.reads_c and not self.problem.finishes)
        panels: tuple[Region, ...] = ()
        if k[0] < k[1]:
            panels = (
                Region(Slot(Tier.DEVICE, "A", a.device_slot), 0, _length(m) * _length(k)),
                Region(Slot(Tier.DEVICE, "B", b.device_slot), 0, _length(k) * _length(n)),
            )
        return Operation(
            Kind.MULTIPLY,
            "C",
            tile,
            step,
            (*panels, c) if keeps_old else panels,
            (c,),
            m,
            n,
            k,
            flops=self.problem.step_flops(_length(m), _length(n), _length(k)),
            first=first,
        )

    def _load_c(
        self, tile: Tile, rows: Span, number: int, slot: Slot, *, whole_tile: bool
    ) -> Iterator[Operation]:
        """Read and upload a strip of C into rows of the tile's accumulator, or into a slot of its own."""
        n, size, host = self._strip_parts(tile, rows, number)
        target = self._in_tile(slot, tile, rows) if whole_tile else Region(slot, 0, host.stop)
        if self.slots.unified:
            yield Operation(Kind.READ, "C", tile, 0, (), (target,), rows, n, bytes=size)
            return
        yield Operation(Kind.READ, "C", tile, 0, (), (host,), rows, n, bytes=size)
        yield Operation(Kind.UPLOAD, "C", tile, 0, (host,), (target,), rows, n, bytes=size)

    def _drain(self, tile: Tile, rows: Span, number: int, c_slot: Slot) -> Iterator[Operation]:
        """Bring a strip of the finished accumulator to the store."""
        n, size, host = self._strip_parts(tile, rows, number)
        source = self._in_tile(c_slot, tile, rows)
        last = self.grid.steps - 1
        if self.problem.finishes:
            finished = Region(Slot(Tier.DEVICE, "D", number % self.slots.finish), 0, host.stop)
            if self.problem.reads_c:
                yield from self._load_c(tile, rows, number, finished.slot, whole_tile=False)
            inputs = (source, finished) if self.problem.reads_c else (source,)
            yield Operation(Kind.FINISH, "D", tile, last, inputs, (finished,), rows, n)
            source = finished
        if self.slots.unified:
            yield Operation(Kind.WRITE, "C", tile, last, (source,), (), rows, n, bytes=size)
            return
        yield Operation(Kind.DOWNLOAD, "C", tile, last, (source,), (host,), rows, n, bytes=size)
        yield Operation(Kind.WRITE, "C", tile, last, (host,), (), rows, n, bytes=size)

    def _strip_parts(self, tile: Tile, rows: Span, number: int) -> tuple[Span, int, Region]:
        """Columns, bytes and host slot of strip `number` of the run."""
        n = self.grid.cols(tile[1])
        elements = _length(rows) * _length(n)
        host = Region(Slot(Tier.HOST, "C", number % max(1, self.slots.host_c)), 0, elements)
        return n, elements * self.problem.itemsizes["C"], host

    def _in_tile(self, slot: Slot, tile: Tile, rows: Span) -> Region:
        """Some rows of the tile that an accumulator holds."""
        top, cols = self.grid.rows(tile[0])[0], _length(self.grid.cols(tile[1]))
        return Region(slot, (rows[0] - top) * cols, (rows[1] - top) * cols)


def _length(span: Span) -> int:
    return span[1] - span[0]
